"""Base layers are sent once to a client that lacks them, and are neither exchanged nor changed after that."""

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.clientapp import ClientApp

from client_app import handlers
from client_app.worker import release_worker
from fedssl.base_layers import layers_digest
from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.export import load_encoder
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_names, read_layers
from fedssl.runs.costs import sum_costs
from fedssl.runs.loaded_run import load_run_folder
from fedssl.runs.verify import verify_run
from fedssl.wire.messages import ARRAYS, BASE, CONFIG, TrainPlan
from fedssl.wire.records import EXACT, record_bytes
from server_app.build import build_run
from server_app.checkpoint import latest_checkpoint
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.training_loop import run_round
from simulation.grid import LocalGrid
from simulation.run import run
from strategies.types import ServerState
from tests.federation import TINY, Federation
from tests.runs import model_bits, read_lines, read_summary

TUNED = ["tuning=last_blocks", "method.projector.hidden_dim=8"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["tuning=last_blocks"],
        ["tuning=head_only"],
        ["tuning=norm"],
        ["tuning=bias"],
        ["tuning=lora", "tuning.rank=2"],
        ["tuning=lora", "tuning.rank=2", "tuning.aggregation=freeze_a"],
    ],
    ids=" ".join,
)
def test_clients_exchange_exactly_the_layers_that_they_train(tmp_path, overrides):
    federation = Federation(tmp_path, *TUNED[1:], *overrides, "num_clients=2", "strategy=fedavg")
    names, base = set(exchanged_names(federation.method)), set(federation.method.base_names)
    before = {name: value.copy() for name, value in read_layers(federation.method, base).items()}
    federation.run(1)
    received = [row.base_bytes for row in federation.report.clients]
    first = [row.bytes_down for row in federation.report.clients]
    federation.run(1)
    for message in (*federation.plans, *federation.updates):
        assert message.array_records[ARRAYS].keys() == names
    assert [BASE in plan.array_records for plan in federation.plans] == [True, True, False, False]
    assert federation.plans[0].array_records[BASE].keys() == base
    assert received == [record_bytes(EXACT.encode(before))] * 2
    assert [row.base_bytes for row in federation.report.clients] == [0, 0]
    for earlier, later in zip(first, federation.report.clients, strict=True):
        assert received[0] < earlier - later.bytes_down < received[0] + 200  # and its place in the message
    assert federation.layers.keys() == names
    for name, value in read_layers(federation.method, base).items():
        np.testing.assert_array_equal(value, before[name])
    digests = {plan.config_records[CONFIG]["base-digest"] for plan in federation.plans}
    assert digests == {layers_digest(before)}


class Changing:
    """Two clients of one process. A function changes their plans before the app receives them."""

    def __init__(self, folder, *overrides):
        release_worker()  # which may have the base layers
        app, self.plans = ClientApp(), []

        @app.train()
        def train(message, ctx):
            self.plans.append(message.content)
            message.content = self.change(message.content)
            return handlers.handle(message, ctx)

        self.grid = LocalGrid(app, num_clients=2)
        settings = compose([*TINY, *TUNED, "num_clients=2", f"output_dir={folder}", *overrides])
        self.federation = build_run(self.grid, settings).federation
        self.state = ServerState()

    def round(self, change=lambda plan: plan):
        """Run a round; return the dropped clients with the reasons, and whether each plan had the base."""
        self.change, self.plans = change, []
        self.state, result = run_round(WallClockExchange(self.grid), lambda: self.federation, self.state)
        return result.dropped, [BASE in plan.array_records for plan in self.plans]


def test_a_client_with_another_base_receives_it_again(tmp_path):
    federation = Changing(tmp_path)

    def tamper(content):
        if len(federation.plans) > 1:
            return content
        base = {name: np.array(array) for name, array in TrainPlan.from_content(content).base.items()}
        base["encoder.blocks.0.0.weight"][0] += 1
        return RecordDict({**content, BASE: EXACT.encode(base)})

    dropped, _ = federation.round(tamper)
    assert list(dropped) == [0]
    assert "the base layers of the plan are refused: their digest is not" in dropped[0]
    assert federation.round() == ({}, [True, False])
    assert federation.round() == ({}, [False, False])


def test_a_client_without_the_base_receives_it_again(tmp_path):
    federation, folder, kept = Changing(tmp_path), tmp_path / "base", tmp_path / "kept"
    assert federation.round() == ({}, [True, True])

    def lose(content):
        release_worker()
        folder.rename(kept) if len(federation.plans) == 1 else kept.rename(folder)
        return content

    dropped, sent = federation.round(lose)
    assert sent == [False, False]
    assert list(dropped) == [0]
    digest = layers_digest(federation.federation.context.base)
    assert f"the client lacks the base layers {digest}, and the plan has none" in dropped[0]
    assert federation.round() == ({}, [True, False])


def test_plans_whose_settings_have_no_base_are_refused(tmp_path):
    federation = Changing(tmp_path)

    def tamper(content):
        config = ConfigRecord({**content.config_records[CONFIG], "base-digest": ""})
        return RecordDict({**content, CONFIG: config}) if len(federation.plans) == 1 else content

    dropped, _ = federation.round(tamper)
    assert "the plan has base layers but the settings do not, or the reverse" in dropped[0]


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    folder = tmp_path / "run"
    overrides = [*TINY, *TUNED, "method=byol", "rounds=3", "clients_per_round=2", "snapshot_every=1"]
    run([*overrides, f"output_dir={folder}"])
    again = tmp_path / "again"
    run([*overrides, "pause_after=1", f"output_dir={again}"])
    release_worker()
    (damaged,) = (again / "base").iterdir()
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-8] + bytes(4))
    run([f"resume={again}"])
    assert damaged.read_bytes() == content
    assert f"{damaged} is damaged: it is written again" in (again / "run.log").read_text()
    assert model_bits(again) == model_bits(folder)
    ended = latest_checkpoint(folder / "checkpoints").models["global"].layers
    settings = compose([*overrides, f"output_dir={folder}"])
    method = build_method(settings.model)
    assert ended.keys() == set(exchanged_names(method))
    (file,) = (folder / "base").iterdir()
    base = read_layers(method, method.base_names)
    assert file.stem == layers_digest(base)

    summary = read_summary(folder)
    size = record_bytes(EXACT.encode(base))
    assert summary["base"] == {"digest": file.stem, "bytes": size}
    lines = read_lines(folder / "metrics.jsonl")
    assert lines[0]["base"] == {"bytes": 2 * size, "clients": 2}
    costs = sum_costs(lines)
    assert costs.base_bytes == size  # once, however many rounds a client takes part in
    sent = sum(line.get("base", {"bytes": 0})["bytes"] for line in lines)
    assert costs.bytes_down == size + (sum(line["bytes_down"] for line in lines) - sent) / 2

    weights = load_encoder(folder / "encoder.pt").state_dict()
    for name, value in {**ended, **base}.items():
        if name.startswith("encoder."):
            np.testing.assert_array_equal(weights[name.removeprefix("encoder.")].numpy(), value)

    loaded = load_run_folder(folder, [])
    with loaded.loaded(loaded.only_model(loaded.snapshots[-1], figure="x"), round=3) as method:
        assert all(torch.equal(method.encoder.state_dict()[name], weights[name]) for name in weights)
    assert verify_run(folder).problems == ()
    file.rename(file.with_name(f"{'0' * 64}.safetensors"))
    assert verify_run(folder).problems == tuple(
        f"base/{name}.safetensors is missing or damaged" for name in sorted(["0" * 64, file.stem])
    )
    with pytest.raises(InputError, match="has other base layers than this run"):
        run([f"resume={folder}", "rounds=4"])
    with pytest.raises(InputError, match="lacks the base layers of the run"):
        _ = load_run_folder(folder, []).method
