"""Secure aggregation: the server sees a sum, the right one, and of nobody more."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

from fedssl.config.load import compose
from fedssl.errors import InputError, RunError
from fedssl.secure_aggregation import client as client_side
from fedssl.secure_aggregation.protocol import apply_delta
from server_app.build import build_run
from server_app.exchanges.secure import RUN_RULES, SecureExchange, sums_are_revealed_once
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.messaging import no_activity
from server_app.round import Round
from server_app.training_loop import run_round
from simulation.run import run
from strategies.types import ServerState
from tests.devices import FORM, Devices, context, run_server_app, write_images, write_places
from tests.federation import Federation, finish
from tests.runs import read_lines, read_summary

SMALL = ["num_clients=4", "rounds=2", "local_epochs=1", "dataset.limit=60", "threads=1", "partition=iid"]
SMALL += ["encoder.width=4", "method.projector.hidden_dim=8", "method.projector.out_dim=4"]
UNIFORM = ["strategy=fedavg", "strategy.weighting=uniform"]
SECURE = ["secure_aggregation=secagg_plus", *UNIFORM]


def within(one, other, step):
    for name, array in one.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(array, other[name], atol=step, err_msg=name)


def test_the_sum_is_the_plain_one_within_a_step(tmp_path):
    """Values travel as multiples of 2 * 8 / 2^22 = 3.8e-6, rounded at random: the mean errs by less than that."""
    plain = Federation(tmp_path / "a", *SMALL, *UNIFORM)
    secure = Federation(tmp_path / "b", *SMALL, *SECURE)
    within(secure.run(1), plain.run(1), 2 * 8 / 2**22)
    assert [row.client for row in secure.report.clients] == [0, 1, 2, 3]
    assert all(row.cosine == {} and row.loss is None and row.examples is None for row in secure.report.clients)
    # Masked numbers are whole, of 4 to 8 bytes, so more travels up than down.
    assert all(row.bytes_up > 4 * sum(array.size for array in plain.layers.values()) for row in secure.report.clients)


def test_a_variance_that_rounding_makes_negative_is_zero():
    layers = {"bn.running_mean": np.zeros(2), "bn.running_var": np.array([1e-8, 1.0])}
    applied = apply_delta(layers, np.array([-1.0, -2.0, -4e-5, 0.5]))
    assert {name: layer.tolist() for name, layer in applied.items()} == {
        "bn.running_mean": [-1, -2],
        "bn.running_var": [0, 1.5],
    }


@pytest.mark.parametrize(("largest", "warns"), [(500, False), (10_000, True)])
def test_a_largest_weight_far_above_the_others_is_a_warning(tmp_path, caplog, largest, warns):
    """Clients have 15 images: steps of 2 * 8 / 2^22 * 10,000 / 15 = 0.0025, and 15 / 500 is above 1 / 64."""
    own = ["strategy=fedavg", "secure_aggregation=secagg_plus", f"secure_aggregation.max_weight={largest}"]
    Federation(tmp_path, *SMALL, *own).run(2)
    assert caplog.text.count("far fewer than secure_aggregation.max_weight=10000") == warns
    assert ("rounded to multiples of 0.003" in caplog.text) == warns


@pytest.mark.heavy
def test_the_default_weighting_by_images(tmp_path):
    """Clients of 7 to 30 images: the mean errs by 1.5 steps times the largest over the mean weight, less than 2."""
    overrides = ["strategy=fedavg", "partition=dirichlet", "partition.alpha=1"]
    plain = Federation(tmp_path / "a", *SMALL, *overrides)
    secure = Federation(tmp_path / "b", *SMALL, *overrides, "secure_aggregation=secagg_plus")
    sizes = [len(part) for part in secure.components.client_data.parts]
    assert max(sizes) < 2 * np.mean(sizes)
    within(secure.run(1), plain.run(1), 3 * 2 * 8 / 2**22)
    assert secure.report.features["secure_aggregation"]["max_weight"] == max(sizes)
    assert all(row.examples is None for row in secure.report.clients)
    uniform = Federation(tmp_path / "c", *SMALL, *overrides, "strategy.weighting=uniform").run(1)
    with pytest.raises(AssertionError):
        within(uniform, plain.layers, 3 * 2 * 8 / 2**22)
    # The plain rule drops clients with more images than that; here they drop themselves.
    secure = ["secure_aggregation=secagg_plus", f"aggregation.max_examples={max(sizes) - 1}"]
    limited = Federation(tmp_path / "d", *SMALL, *overrides, *secure)
    assert limited.components.settings.secure_aggregation.max_weight == max(sizes) - 1


class Watched(SecureExchange):
    """Remembers all that the server receives, and loses the replies of some nodes from some stage on."""

    def __init__(self, federation, lost=()):
        super().__init__(federation.grid, federation.components.settings.secure_aggregation)
        self.seen, self._lost, self.stage = [], dict(lost), 0

    def send_and_receive(self, messages, **options):
        self.stage += 1
        for message, reply in super().send_and_receive(messages, **options):
            if self.stage < self._lost.get(reply.metadata.src_node_id, 99):
                self.seen.append((self.stage, reply))
                yield message, reply


def one_round(federation, exchange):
    one = Round(federation.components.federation, federation.state)
    return one.run(exchange)


def test_no_single_update_reaches_the_server(tmp_path, monkeypatch):
    """What comes up of a client has nothing to do with its update: the same update looks different each time."""
    deltas = []
    original = client_side.delta_of
    monkeypatch.setattr(client_side, "delta_of", lambda *layers: deltas.append(original(*layers)) or deltas[-1])
    seen, models = [], []
    for name in ("a", "b"):
        federation = Federation(tmp_path / name, *SMALL, *SECURE)
        exchange = Watched(federation)
        state, _ = one_round(federation, exchange)
        models.append(state.models["global"].layers)
        vectors = [reply for stage, reply in exchange.seen if stage == 3]
        assert not any(reply.content.array_records[key] for reply in vectors for key in reply.content.array_records)
        seen.append([np.load(_file(reply), allow_pickle=False) for reply in vectors])
    assert np.array_equal(deltas[0], deltas[4])  # the second run's client 0 did the same
    assert all(np.array_equal(array, models[1][name]) for name, array in models[0].items())  # and the sum is the same
    for first, second, delta in zip(*seen, deltas, strict=False):
        assert np.mean(first == second) < 0.01
        assert abs(np.corrcoef(first, delta)[0, 1]) < 0.2
        assert first.min() >= 0
        assert first.max() < 2**32


def test_a_round_that_is_repeated_reveals_no_sum(tmp_path):
    """The difference of two sums would be the update of the client that dropped out of the first."""
    overrides = ["num_clients=5", "secure_aggregation.dropout_fraction=0.2"]
    for min_updates, phases in ((4, 4), (5, 3)):
        federation = Federation(
            tmp_path / str(phases), *SMALL, *SECURE, *overrides, f"aggregation.min_updates={min_updates}"
        )
        exchange = Watched(federation, {federation.components.federation.nodes[4]: 3})
        if phases == 4:
            one_round(federation, exchange)
        else:
            with pytest.raises(RunError, match="4 of 5 .* and 5 are needed .* a smaller aggregation.min_updates"):
                one_round(federation, exchange)
        assert exchange.stage == phases


def _file(reply):
    return io.BytesIO(reply.content.config_records[client_side.SECAGG_CONFIG_KEY]["masked_params"][1])


@pytest.mark.parametrize(("stage", "used"), [(1, [0, 2, 3]), (2, [0, 2, 3]), (3, [0, 2, 3]), (4, [0, 1, 2, 3])])
def test_a_client_lost_in_any_stage_costs_itself(tmp_path, stage, used):
    """With 4 clients the graph is complete and the threshold 3. Who sent its masked update is in the sum."""
    federation = Federation(tmp_path / "a", *SMALL, *SECURE)
    nodes = federation.components.federation.nodes
    state, report = one_round(federation, Watched(federation, lost={nodes[1]: stage}))
    assert [row.client for row in report.clients] == used
    assert report.dropped == ({1: "no reply in time"} if 1 not in used else {})

    plain = Federation(tmp_path / "b", *SMALL, *UNIFORM)
    one = Round(plain.components.federation, plain.state)
    sent = WallClockExchange(plain.grid).send_and_receive(one.messages, timeout=60)
    replies = [reply for _, reply in sent if reply.metadata.src_node_id in {nodes[client] for client in used}]
    expected, _ = finish(one, replies)
    within(state.models["global"].layers, expected.models["global"].layers, 2 * 8 / 2**22)


def test_shares_that_are_not_used_are_reported(tmp_path, caplog):
    federation = Federation(tmp_path, *SMALL, *SECURE)
    exchange, node = Watched(federation), federation.components.federation.nodes[1]
    send = exchange.send_and_receive

    def damaged(messages, **options):
        for message, reply in send(messages, **options):
            values = reply.content.config_records[client_side.SECAGG_CONFIG_KEY]
            if "shares" in values and message.metadata.dst_node_id == node:
                values["shares"] = [share[:-1] for share in values["shares"]]
            yield message, reply

    exchange.send_and_receive = damaged
    _, report = one_round(federation, exchange)
    assert [row.client for row in report.clients] == [0, 1, 2, 3]
    assert "round 1: the shares of client 1 are not used: it sent a malformed share" in caplog.text
    assert report.features["secure_aggregation"]["phases"]["unmask"]["invalid"] == 1


def test_too_few_to_take_the_masks_away_is_said(tmp_path):
    federation = Federation(tmp_path, *SMALL, *SECURE)
    nodes = federation.components.federation.nodes
    with pytest.raises(RunError, match="round 1: too few clients completed secure aggregation"):
        one_round(federation, Watched(federation, lost={nodes[1]: 4, nodes[2]: 4}))
    assert federation.state.round == 0


def test_a_whole_run(tmp_path, capsys):
    run([*SMALL, *SECURE, "final_evaluation=none", f"output_dir={tmp_path / 'run'}"])
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["clients"] for line in lines] == [4, 4]
    summary = read_summary(tmp_path / "run")["secure_aggregation"]
    assert summary == lines[1]["secure_aggregation"]
    phases = summary.pop("phases")
    graph = {"clients": 4, "neighbors": 3, "threshold": 3, "max_dropouts": 1, "max_corrupted": 1, "security_bits": 40}
    graph |= {"correctness_bits": 30, "mask_generator": "chacha20", "adversary": "honest-but-curious server"}
    assert summary == graph
    for key in ("bytes_up", "bytes_down"):
        assert sum(phase[key] for phase in phases.values()) == lines[1][key]
    assert 0 < sum(phase["seconds"] for phase in phases.values()) < lines[1]["seconds"]
    assert "secure aggregation of 4 clients: 3 neighbors, threshold 3, at most 1 dropouts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["strategy=l_dawa"], "needs a strategy that adds up the clients, but strategy=l_dawa compares"),
        (["strategy=median"], "needs a strategy that adds up the clients, but strategy=median compares, selects or"),
        (["strategy=loss_weighted"], "strategy=loss_weighted weights them by their losses relative to the smallest"),
        (
            ["strategy=fedavg", "secure_aggregation.max_weight=10"],
            "secure_aggregation.max_weight=10 but the largest client has 15 images, which are its weight; set it to 15",
        ),
        (["privacy=central", "encoder.norm=group"], "secure_aggregation=secagg_plus reveals only the sum of updates"),
        (["aggregation.max_norm_ratio=5"], "secure_aggregation=secagg_plus reveals only the sum of updates"),
        (
            ["aggregation.over_selection=1", "clients_per_round=3"],
            "set aggregation.over_selection=0, or more",
        ),
        (["secure_aggregation.threshold=5"], "secure_aggregation.threshold=5 but a client has 4 shares"),
        (["secure_aggregation.threshold=2"], "has 0 security bits"),
        (["secure_aggregation.neighbors=4"], "neighbors=4 but 4 clients per round have 3 others each"),
        (
            ["secure_aggregation.dropout_fraction=0.5", "secure_aggregation.corrupted_fraction=0.5"],
            "is not possible with any number of neighbors; set secure_aggregation.dropout_fraction=0",
        ),
        (
            ["secure_aggregation.mask_generator=mt19937"],
            "mask_generator=mt19937 has 28 security bits, but secure_aggregation.security_bits=40; lower it, or set",
        ),
        (["num_clients=1024"], "more than 1023 quantized updates exceeds 2.32; lower clients_per_round"),
        (
            ["clients_per_round=2"],
            "clients_per_round=2 but secure aggregation needs at least 3 .*; raise it, or set",
        ),
    ],
)
def test_what_needs_single_updates_is_refused(tmp_path, overrides, reason):
    usual = SECURE if "strategy" not in overrides[0] else SECURE[:1]
    with pytest.raises((InputError, RunError), match=reason):
        Federation(tmp_path, *SMALL, *usual, *overrides).run(1)


def test_nonfinite_updates_stay_and_clipped_ones_are_logged(tmp_path, monkeypatch, caplog):
    """Under masks nobody else could find either."""
    federation = Federation(tmp_path, *SMALL, *SECURE)
    original = client_side.delta_of

    def far(*layers):
        delta = original(*layers)
        delta[0] = 100
        return delta

    monkeypatch.setattr(client_side, "delta_of", far)
    federation.run(1)
    assert "1 values of the update exceed secure_aggregation.clipping_range=8 and are clipped to it" in caplog.text
    monkeypatch.setattr(client_side, "delta_of", lambda *layers: original(*layers) * np.nan)
    with pytest.raises(RunError, match="training diverged: the update has values that are not finite"):
        federation.run(1)


@pytest.mark.heavy
def test_devices_that_give_sums_only_train_in_a_secure_run(tmp_path):
    contexts = [
        context(
            data_path=write_images(tmp_path / f"p{number}", 12, seed=number),
            state_path=tmp_path / "s",
            client_name=f"d{number}",
            secure_aggregation_only=True,
        )
        for number in range(3)
    ]
    overrides = [*FORM, "encoder.width=4", "local_epochs=1", "rounds=1", "num_clients=3", "threads=1", *SECURE]
    overrides += ["secure_aggregation.dropout_fraction=0"]
    grid = Devices(*contexts)
    components = build_run(grid, compose([*overrides, f"output_dir={tmp_path / 'run'}"]))
    _, report = run_round(components.make_exchange(grid, no_activity), lambda: components.federation, ServerState())
    assert [row.client for row in report.clients] == [0, 1, 2]


def test_a_graph_that_devices_refuse_is_changed_on_resume(tmp_path):
    """Without dropouts of the server, two of four neighbors suffice; with those of the devices, all four are needed."""
    folder = tmp_path / "run"
    grid = Devices(
        *(
            context(data_path=place, state_path=tmp_path / "states", client_name=place.name)
            for place in write_places(tmp_path / "images", "abcd")
        )
    )
    overrides = [*FORM, "encoder.width=4", "local_epochs=1", "rounds=1", "threads=1", *SECURE, "checkpoint_every=1"]
    overrides += ["evaluation=none", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]
    weak = "secure aggregation of 4 clients with 2 neighbors and a threshold of 2 has 1.58 security bits"
    with pytest.raises(RunError, match=f"round 1: too few clients completed secure aggregation: .*{weak}"):
        run_server_app(grid, [*overrides, "secure_aggregation.dropout_fraction=0", f"output_dir={folder}"])
    assert f"devices whose limits.yaml allows no less refuse to train: {weak}" in (folder / "run.log").read_text()
    failed = json.loads((folder / "fleet.json").read_text())["failed"]
    assert {client: failure["round"] for client, failure in failed.items()} == dict.fromkeys("0123", 1)
    assert all(weak in failure["reason"] for failure in failed.values())
    run_server_app(grid, [f"resume={folder}", "secure_aggregation.dropout_fraction=0.2"])
    (line,) = read_lines(folder / "metrics.jsonl")
    assert (line["clients"], line["dropped"]) == (4, {})
    assert (folder / "run.log").read_text().count("limits.yaml") == 1


@pytest.mark.parametrize(("every", "is_deployment", "refused"), [(5, True, True), (1, True, False), (5, False, False)])
def test_devices_need_a_checkpoint_of_each_round(every, is_deployment, refused):
    settings = SimpleNamespace(secure_aggregation=object(), recording=SimpleNamespace(checkpoint_every=every))
    parts = SimpleNamespace(settings=settings, context=SimpleNamespace(is_deployment=is_deployment))
    assert sums_are_revealed_once in RUN_RULES
    problem = sums_are_revealed_once(parts)
    assert (problem is not None) == refused
    assert problem is None or problem.endswith("set checkpoint_every=1")
