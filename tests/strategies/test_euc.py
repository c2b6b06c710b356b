"""EUC: intervals by hand, rounds against a transcription that keeps every client's whole model, bytes, resume."""

import shutil
import zlib

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from torch import nn

from client_app.app import app as client_app
from fedssl.arrays import GlobalLayers
from fedssl.config.load import compose
from fedssl.encoders.base import Encoder
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import exchanged_layers
from fedssl.rules import check_rules
from fedssl.schedule.phases import end_to_end
from fedssl.wire.messages import ClientUpdate, TrainPlan
from fedssl.wire.records import content_bytes
from server_app.checkpoint import latest_checkpoint, save_checkpoint
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.federation import sample_clients
from server_app.training_loop import run_round
from simulation.grid import LocalGrid
from strategies.euc import EUC, DiscrepancySum, averaging_intervals
from strategies.fedavg import FedAvg
from strategies.mods.server_optimizer import FedAvgM
from strategies.types import GLOBAL, ServerState
from tests.arrays import same
from tests.contexts import federation_of, run_context
from tests.federation import Federation, model_of


def test_intervals_by_hand():
    # d / numbers: a 10/60 = 0.17, b 20/30 = 0.67, c 8/10 = 0.8, in this order, though c has the least d.
    #   a: 40 of 100 numbers are left, 10/38 = 0.26 of d is taken: on
    #   b: 10 of 100 are left, 30/38 = 0.79 is taken: stop, with b
    d = {"c": 8.0, "b": 20.0, "a": 10.0}
    sizes = {"a": 60, "b": 30, "c": 10}
    assert averaging_intervals(d, sizes, phi=4) == {"c": 1, "b": 4, "a": 4}
    small = {name: 1e-9 * value for name, value in d.items()}
    assert averaging_intervals(small, sizes, phi=4) == {"c": 1, "b": 4, "a": 4}


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        # The average is (2, 4), the clients are (0, -2) and (0, 2) away from it: (4 + 4) / 2.
        ("uniform", 4),
        # With 1 and 3 images the average is (2, 5), the clients are (0, -3) and (0, 1) away: (9 + 3 * 1) / 4.
        ("examples", 3),
    ],
)
def test_discrepancy_by_hand(weighting, expected):
    rule = DiscrepancySum(weighting=weighting)
    rule.start(GlobalLayers({"a.weight": np.array([[1.0, 2.0]]), "a.bias": np.zeros(3)}))
    for client, (weight, examples) in enumerate([([[2.0, 2.0]], 1), ([[2.0, 6.0]], 3)]):
        layers = {"a.weight": np.array(weight), "a.bias": np.full(3, client)}
        rule.add(ClientUpdate(layers=layers, partition_id=client, num_examples=examples), None)
    rule.finish()
    assert rule.discrepancy == {"a.weight": pytest.approx(expected)}  # a bias does not wait


def test_discrepancy_of_clients_that_are_nearly_equal():
    random = np.random.default_rng(0)
    start = {"a.weight": random.standard_normal((900, 700), np.float32)}  # more than one tile
    clients = [start["a.weight"] + np.float32(1e-3) * random.standard_normal((900, 700), np.float32) for _ in range(4)]
    rule = DiscrepancySum()
    rule.start(GlobalLayers(start))
    for client, weight in enumerate(clients):
        rule.add(ClientUpdate(layers={"a.weight": weight}, partition_id=client), None)
    rule.finish()
    average = np.mean([weight.astype(float) for weight in clients], axis=0)
    expected = np.mean([np.sum((average - weight) ** 2) for weight in clients])
    assert rule.discrepancy["a.weight"] == pytest.approx(expected, rel=1e-5)


class Blocks(Encoder):
    """Modules by number."""

    def __init__(self, *modules):
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)
        self.define_stages(stages=(), widths=())


class Toy(SSLMethod):
    """All kinds of layers, and a part that never travels."""

    local_parts = ("target_encoder",)

    def __init__(self):
        super().__init__()
        self.encoder = Blocks(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 6), nn.Linear(6, 4))
        self.projector = nn.Linear(4, 20, bias=False)
        self.target_encoder = Blocks(nn.Linear(2, 2))
        fill(self)


def fill(method):
    generator = torch.Generator().manual_seed(0)
    for value in method.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)


STEP = {"encoder.0.weight": 0.1, "encoder.2.weight": 0.02, "encoder.3.weight": 0.3, "projector.weight": 0.01}


def trained(name, array, *, round, client):
    """A layer after local training, as a function of where it began, so that what a client begins with matters."""
    random = np.random.default_rng([round, client, zlib.crc32(name.encode())])
    if array.dtype.kind == "i":
        return array + 10 * round + client
    # In the course of the rounds the projector comes to differ most.
    size = STEP.get(name, 0.05) * (5.0 ** (round - 2) if name.startswith("projector") else 1)
    return (0.9 * array + size * random.uniform(0, 1, array.shape)).astype(array.dtype)


class ToyFederation:
    """A federation of toys whose clients share one model object, as clients of one process do."""

    def __init__(self, strategy, *, num_clients, clients_per_round, crashes=(), server_optimizer=None):
        self.strategy, self.states, self.method = strategy, {}, Toy()
        self.begun, self.bytes_down, self.bytes_up, self.plans, self.counted = {}, {}, {}, {}, {}
        start = exchanged_layers(self.method)
        app = ClientApp()

        @app.train()
        def train(message, context):
            plan, client = TrainPlan.from_content(message.content), context.node_config["partition-id"]
            other = EUC(interval=2) if isinstance(strategy, EUC) else FedAvg()  # another object than the server's
            half = other.client
            for value in self.method.named_tensors.values():
                value.data.fill_(7777)  # whatever the client before left behind
            state = self.states.get(client)
            begun_with = half.load_start(self.method, plan, state)
            self.begun[plan.round, client] = {name: value.clone() for name, value in self.method.named_tensors.items()}
            for name, value in self.method.named_tensors.items():
                new = trained(name, value.detach().numpy(), round=plan.round, client=client)
                value.data.copy_(torch.from_numpy(np.asarray(new)))
            kept = half.state_to_save(self.method, plan, start=begun_with, state=state)
            if kept:
                self.states[client] = kept
            if (plan.round, client) in crashes:
                raise RuntimeError("the battery is empty")
            layers = half.layers_to_upload(self.method, plan)
            self.plans[plan.round, client] = plan
            self.bytes_down[plan.round, client] = sum(array.nbytes for array in plan.layers.values())
            self.bytes_up[plan.round, client] = sum(array.nbytes for array in layers.values())
            update = ClientUpdate(layers=layers, partition_id=client, num_examples=10 * (client + 1))
            content = update.to_content(plan)
            self.counted[plan.round, client] = content_bytes(content)
            return Message(content, reply_to=message)

        self.grid = LocalGrid(app, num_clients=num_clients)
        run = {"phases": end_to_end(rounds=9, depth=0), "clients_per_round": clients_per_round}
        context = run_context(self.method, initial_layers=lambda: start, **run)
        mods = () if server_optimizer is None else (server_optimizer,)
        self.federation = federation_of(self.grid, strategy, context, mods=mods)
        self.state, self.report = ServerState(), None

    @property
    def layers(self):
        return model_of(self.federation.context, self.state, GLOBAL).layers

    def round(self):
        self.state, self.report = run_round(WallClockExchange(self.grid), lambda: self.federation, self.state)
        return self.layers


def slowly(start, rounds, *, phi, num_clients, clients_per_round, weighting="uniform", crashes=(), trained=trained):
    """FedLAMA with a whole model for every client; yields what each round begins and ends with."""
    names = list(start)
    candidates = [name for name in names if start[name].ndim == 2]
    new = {name: array.astype(float) if array.dtype.kind == "f" else array for name, array in start.items()}
    models = {k: dict(new) for k in range(num_clients)}
    outdated = {k: set(names) for k in range(num_clients)}  # layers a client has to fetch before it trains
    tau = dict.fromkeys(names, 1)
    for r in range(1, rounds + 1):
        chosen = sample_clients(0, r, num_clients=num_clients, clients_per_round=clients_per_round)
        begun = {}
        for k in chosen:
            begun[k] = models[k] | {name: new[name] for name in outdated[k]}
            models[k] = {name: trained(name, begun[k][name], round=r, client=k) for name in names}
            outdated[k] = set(names) if (r, k) in crashes else set()
        used = [k for k in chosen if (r, k) not in crashes]
        n = {k: k + 1.0 if weighting == "examples" else 1.0 for k in used}
        share = {k: n[k] / sum(n.values()) for k in used}
        average = {name: sum(share[k] * models[k][name] for k in used) for name in names}
        far = {name: [np.sum((average[name] - models[k][name]) ** 2) for k in used] for name in candidates}
        d = {name: np.dot([share[k] for k in used], far[name]) / tau[name] for name in candidates}
        for name in names:
            if r % tau[name] == 0:
                new[name] = average[name] if start[name].dtype.kind == "f" else np.rint(average[name]).astype(int)
                for k in range(num_clients):
                    outdated[k].add(name)
        synced = [name for name in names if r % tau[name] == 0]
        if r % phi == 0:
            tau = dict.fromkeys(names, 1)
            done_d = done_numbers = 0.0
            for name in sorted(candidates, key=lambda name: d[name] / start[name].size):
                done_d, done_numbers = done_d + d[name], done_numbers + start[name].size
                tau[name] = phi
                if 1 - done_numbers / sum(start[c].size for c in candidates) < done_d / sum(d.values()):
                    break
        yield dict(new), begun, dict(tau), synced


@pytest.mark.parametrize(
    ("phi", "num_clients", "clients_per_round", "weighting", "crashes"),
    [
        (3, 4, 2, "uniform", ()),
        (2, 3, 3, "uniform", ((3, 1), (4, 0), (6, 2))),
        (3, 5, 3, "examples", ((4, 0), (4, 1), (5, 2))),
    ],
)
def test_rounds_equal_the_transcription(phi, num_clients, clients_per_round, weighting, crashes):
    counts = {"num_clients": num_clients, "clients_per_round": clients_per_round}
    strategy = EUC(interval=phi, weighting=weighting)
    toys = ToyFederation(strategy, **counts, crashes=crashes)
    expected = slowly(toys.layers, 9, phi=phi, **counts, weighting=weighting, crashes=crashes)
    schedules = []
    before = dict.fromkeys(toys.layers, 1)
    for round, (new, begun, tau, synced) in enumerate(expected, start=1):
        layers = toys.round()
        for name, array in layers.items():
            np.testing.assert_allclose(array, new[name], rtol=1e-5, err_msg=name)
            assert array.dtype == toys.method.named_tensors[name].numpy(force=True).dtype
        for client, model in begun.items():
            for name, array in model.items():
                found = toys.begun[round, client][name].numpy(force=True)
                np.testing.assert_allclose(found, array, rtol=1e-5, err_msg=f"{round} {client} {name}")
        strategy_metrics = toys.report.strategy_metrics
        assert strategy_metrics["synced_layers"] == len(synced)
        slow = {name: phi for name, interval in tau.items() if interval == phi}
        assert strategy_metrics.get("intervals") == (slow if tau != before else None)
        assert set(toys.report.dropped) == {client for r, client in crashes if r == round and client in begun}
        before = tau
        schedules.append(slow.keys())
    assert any(0 < len(slow) < 4 for slow in schedules)  # some wait and some do not
    assert len(set(map(tuple, schedules))) > 2  # and this changes


def test_the_report_counts_the_bytes_that_were_not_sent():
    crashes = ((4, 0),)
    toys = ToyFederation(EUC(interval=3), num_clients=4, clients_per_round=3, crashes=crashes)
    whole = sum(array.nbytes for array in toys.layers.values())
    saved_up = saved_down = 0
    for round in range(1, 10):
        toys.round()
        clients = [row.client for row in toys.report.clients]
        saved = toys.report.strategy_metrics["bytes_saved"]
        assert saved["up"] == sum(whole - toys.bytes_up[round, client] for client in clients)
        assert saved["down"] == sum(whole - toys.bytes_down[round, client] for client in clients)
        saved_up, saved_down = saved_up + saved["up"], saved_down + saved["down"]
        for row in toys.report.clients:  # the rows count all of a message, the plan as well
            assert toys.bytes_up[round, row.client] < row.bytes_up == toys.counted[round, row.client]
    assert saved_up > 0
    assert saved_down > 0


@pytest.mark.parametrize("server_optimizer", [None, FedAvgM(momentum=0.5)])
def test_a_resumed_run_has_the_same_bits(tmp_path, server_optimizer):
    def toys():
        return ToyFederation(EUC(interval=3), num_clients=4, clients_per_round=2, server_optimizer=server_optimizer)

    whole, resumed = toys(), toys()
    for _ in range(9):
        expected, layers = whole.round(), resumed.round()
        assert same(layers, expected)
        assert resumed.report == whole.report
        save_checkpoint(tmp_path, resumed.state, keep=1)
        kept = resumed.states
        resumed = toys()
        resumed.state, resumed.states = latest_checkpoint(tmp_path), kept


def test_an_interval_of_one_is_fedavg_bit_for_bit(tmp_path):
    plain = Federation(tmp_path / "fedavg", "strategy=fedavg", "strategy.weighting=uniform", "method=byol")
    euc = Federation(tmp_path / "euc", "strategy=euc", "strategy.interval=1", "method=byol")
    expected, layers = plain.run(3), euc.run(3)
    assert same(layers, expected)
    assert euc.report.strategy_metrics == {"synced_layers": len(layers), "bytes_saved": {"up": 0, "down": 0}}


def test_a_client_without_its_state_sits_out_a_round(tmp_path):
    federation = Federation(tmp_path, "strategy=euc", "method=simclr", "num_clients=3")
    federation.grid = LocalGrid(client_app, num_clients=3)  # without the federation's assertion that nobody fails
    federation.run(3)
    assert federation.report.strategy_metrics["bytes_saved"]["up"] > 0  # some layers stayed with the clients
    shutil.rmtree(tmp_path / "clients" / "0000" / "0")
    federation.run(1)
    (reason,) = federation.report.dropped.values()
    assert "the plan lacks" in reason
    assert [row.client for row in federation.report.clients] == [1, 2]
    federation.run(1)
    rows = federation.report.clients
    assert [row.client for row in rows] == [0, 1, 2]
    federation.run(1)
    assert federation.report.dropped == {}


def test_settings_are_refused_with_the_reason():
    with pytest.raises(InputError, match="^strategy.interval=0 must be an integer of at least 1"):
        compose(["strategy=euc", "strategy.interval=0"])
    with pytest.raises(InputError, match="^strategy.weighting=loss must be examples or uniform$"):
        EUC(weighting="loss")
    with pytest.raises(InputError, match="clients_per_round=1; 2 or more are needed"):
        check_rules([EUC().problem], run_context(Toy(), num_clients=10, clients_per_round=1))
    check_rules([EUC(interval=1).problem], run_context(Toy(), num_clients=10, clients_per_round=1))
    check_rules([EUC().problem], run_context(Toy(), num_clients=10, clients_per_round=2))


@pytest.mark.parametrize(("interval", "warns"), [(1, False), (2, False), (3, True)])
def test_an_interval_without_effect_is_a_warning(caplog, interval, warns):
    context = run_context(Toy(), num_clients=4, clients_per_round=2, rounds=3)
    EUC(interval=interval).server.prepare(context)
    assert ("strategy.interval=3 has no effect in rounds=3" in caplog.text) == warns


@pytest.mark.parametrize("schedule", ["end_to_end", "layer_wise"])
def test_changes_of_a_calibration_would_be_lost(tmp_path, schedule):
    run = ["strategy=euc", f"schedule={schedule}", "rounds=4", "calibration=auxiliary"]
    with pytest.raises(InputError, match="^calibration=auxiliary trains all layers .* or strategy.interval=1$"):
        Federation(tmp_path, *run)
    federation = Federation(tmp_path, *run, "strategy.interval=1", "num_clients=2")
    federation.run(1)
    sent = federation.layers
    federation.run(1)
    received = TrainPlan.from_content(federation.plans[-1]).layers
    assert all(np.array_equal(array, sent[name]) for name, array in received.items())


@pytest.mark.parametrize("setting", ["aggregation.buffered=true", "privacy=central", "secure_aggregation=secagg_plus"])
def test_what_needs_the_whole_model_is_refused_before_the_start(tmp_path, setting):
    with pytest.raises(InputError, match=f"^{setting} needs clients that all send and receive the whole model"):
        Federation(tmp_path, "strategy=euc", "num_clients=20", "encoder.norm=group", setting)
