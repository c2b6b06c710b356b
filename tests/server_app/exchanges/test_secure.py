"""Secure aggregation: the server sees a sum, the right one, and clients accept no protocol that would reveal more."""

import io

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedssl.config.load import compose
from fedssl.errors import InputError, RequestRefused, RunError
from fedssl.fleet.limits import Limits
from fedssl.flower_internals import set_task_identity
from fedssl.secure_aggregation import client as client_side
from server_app.build import build_run
from server_app.exchanges.secure import SecureExchange
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.messaging import no_activity
from server_app.round import Round
from server_app.training_loop import run_round
from simulation.run import run
from strategies.types import ServerState
from tests.devices import Devices, context, write_images
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
    limited = Federation(
        tmp_path / "d",
        *SMALL,
        *overrides,
        "secure_aggregation=secagg_plus",
        f"aggregation.max_examples={max(sizes) - 1}",
    )
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
    replies = [
        reply
        for _, reply in WallClockExchange(plain.grid).send_and_receive(one.messages, timeout=60)
        if reply.metadata.src_node_id in {nodes[client] for client in used}
    ]
    expected, _ = finish(one, replies)
    within(state.models["global"].layers, expected.models["global"].layers, 2 * 8 / 2**22)


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
        (["strategy=median"], "needs a strategy that adds up the clients, but strategy=median compares or selects"),
        (["strategy=loss_weighted"], "strategy=loss_weighted weights them by their losses relative to the smallest"),
        (
            ["strategy=fedavg", "secure_aggregation.max_weight=10"],
            "secure_aggregation.max_weight=10 but the largest client has 15 images, which are its weight; set it to 15",
        ),
        (
            ["privacy=central", "encoder.norm=group"],
            "secure_aggregation=secagg_plus reveals only the sum of updates",
        ),
        (["aggregation.max_norm_ratio=5"], "secure_aggregation=secagg_plus reveals only the sum of updates"),
        (
            ["secure_aggregation.threshold=0.67"],
            "secure_aggregation.threshold=0.67 must be an integer of at least 2, or null",
        ),
        (["secure_aggregation.clipping_range=0"], "secure_aggregation.clipping_range=0 must be a number above 0"),
        (["secure_aggregation.threshold=5"], "secure_aggregation.threshold=5 but a client has 4 shares"),
        (["secure_aggregation.threshold=2"], "has 0 security bits"),
        (
            ["secure_aggregation.neighbors=4"],
            "neighbors=4 but 4 clients per round have 3 others each",
        ),
        (
            ["secure_aggregation.dropout_fraction=0.5", "secure_aggregation.corrupted_fraction=0.5"],
            "is not possible with any number of neighbors; set secure_aggregation.dropout_fraction=0",
        ),
        (
            ["secure_aggregation.mask_generator=mt19937"],
            "mask_generator=mt19937 has 28 security bits, but secure_aggregation.security_bits=40; lower it, or set",
        ),
        (["num_clients=1024"], "more than 1023 quantized updates exceeds 2.32; lower clients_per_round"),
        (["clients_per_round=2"], "2 clients are available, and secure aggregation needs 3"),
    ],
)
def test_what_needs_single_updates_is_refused(tmp_path, overrides, reason):
    usual = SECURE if "strategy" not in overrides[0] else SECURE[:1]
    with pytest.raises((InputError, RunError), match=reason):
        Federation(tmp_path, *SMALL, *usual, *overrides).run(1)


SETUP = {
    "stage": "setup",
    "sample_num": 5,
    "share_num": 5,
    "threshold": 3,
    "clipping_range": 8.0,
    "target_range": 2**22,
    "mod_range": 2**32,
    "max_weight": 1.0,
    "mask_generator": "chacha20",
}


@pytest.mark.parametrize(
    ("configs", "reason"),
    [
        ({**SETUP, "threshold": 1}, "5 shares, 1 of which reveal a mask"),
        ({**SETUP, "threshold": 2}, "5 shares, 2 of which reveal a mask"),
        ({**SETUP, "share_num": 4, "threshold": 2}, "4 shares, 2 of which reveal a mask"),  # not more than half
        ({**SETUP, "sample_num": 2, "share_num": 2, "threshold": 2}, "at least 3 clients"),
        ({**SETUP, "threshold": "3"}, "without the number of clients"),
        ({**SETUP, "mod_range": 2}, "mod_range=2 instead of 4294967296"),  # its masks are all 0
        ({**SETUP, "target_range": 2**31}, "target_range=2147483648 instead of 4194304"),
        ({**SETUP, "max_weight": 1e-9}, "max_weight=1e-09; it is 1.0 for equal weights, or a number"),
        ({**SETUP, "max_weight": 2.0**23}, "max_weight=8388608.0; it is 1.0 for equal weights, or a number"),
        ({**SETUP, "sample_num": 1024}, "no more than 1023"),  # their sum would exceed the modulus
        ({**SETUP, "share_num": 6, "threshold": 4}, "5 clients with 6 shares"),
        ({**SETUP, "clipping_range": float("nan")}, "clipping_range=nan"),
        ({**SETUP, "mask_generator": "zeros"}, "mask_generator='zeros'; known are chacha20, mt19937"),
        ({"stage": "collect_masked_vectors", "ctxts": [], "srcs": []}, "does not follow 'unmask'"),
        ({"stage": "unmask", "active_nids": [1, 2, 3], "dead_nids": []}, "does not follow 'unmask'"),
        ({"stage": "nonsense"}, "does not follow 'unmask'"),
    ],
)
def test_a_protocol_that_would_reveal_more_is_refused(configs, reason):
    set_task_identity()
    message = Message(RecordDict({client_side.SECAGG_CONFIG_KEY: ConfigRecord(configs)}), 2, "train")
    state = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises((RequestRefused, ValueError), match=reason):
        client_side.secagg_reply(message, state, lambda: pytest.fail("it trained"))


COLLECTED = {"phase": "collect_masked_vectors", "node": 2, "threshold": 2, "owners": [1, 2, 3]}
SHARES = {"seed_shares": [b"1", b"2", b"3"], "key_shares": [b"4", b"5", b"6"]}


@pytest.mark.parametrize(
    ("active", "dead", "reason"),
    [
        ([1, 2, 3], [3], "both shares of a client"),
        (None, [3], "both shares of a client"),
        ([1, 3], [2], "unmask 2 clients of which at least 2 must be neighbors that survived, and this client one"),
        ([2], [1, 3], "unmask 1 clients of which at least 2"),
        ([1, 2, 4], [], "unmask 3 clients of which at least 2"),
    ],
)
def test_shares_that_would_reveal_an_update_stay(active, dead, reason):
    set_task_identity()
    state = RecordDict({client_side.STATE: ConfigRecord({**COLLECTED, **SHARES})})
    context = Context(run_id=1, node_id=2, node_config={}, state=state, run_config={})

    def unmask(active, dead):
        values = {"stage": "unmask", **({} if active is None else {"active_nids": active}), "dead_nids": dead}
        message = Message(RecordDict({client_side.SECAGG_CONFIG_KEY: ConfigRecord(values)}), 2, "train")
        return client_side.secagg_reply(message, context, lambda: pytest.fail("it trained"))

    with pytest.raises(RequestRefused, match=reason):
        unmask(active, dead)
    reply = unmask([1, 2], [3]).content.config_records[client_side.SECAGG_CONFIG_KEY]
    assert dict(reply) == {"nids": [1, 2, 3], "shares": [b"1", b"2", b"6"]}
    with pytest.raises(RequestRefused, match="does not follow 'unmask'"):
        unmask([1, 2], [3])


HUNDRED = {**SETUP, "sample_num": 100, "share_num": 41, "threshold": 21}


@pytest.mark.parametrize(
    ("values", "limits", "reason"),
    [
        (
            {"share_num": 3, "threshold": 2},
            {},
            "with 2 neighbors and a threshold of 2 has 0 security bits",
        ),
        (
            {"share_num": 21, "threshold": 11},
            {},
            "to 0.2, dropout_fraction to 0.2 and security_bits to 40 or more",
        ),
        ({"share_num": 39, "threshold": 20}, {}, "26.9 security bits if 20 clients are corrupted and 20 drop out, but"),
        ({}, {"security_bits": 100}, "81.9 security bits .* this device requires 100 .security_bits of its limits."),
        ({}, {"corrupted_fraction": 0.4}, "if 40 clients are corrupted and 20 drop out"),
        ({}, {"dropout_fraction": 0.6}, "if 20 clients are corrupted and 60 drop out"),
        (
            {"mask_generator": "mt19937"},
            {},
            "mt19937 have 28 security bits, but this device requires 40",
        ),
        ({"share_num": 21, "threshold": 11}, {"security_bits": 1, "corrupted_fraction": 0.01}, ""),
        ({"mask_generator": "mt19937"}, {"security_bits": 28}, ""),
        ({}, {}, ""),
    ],
)
def test_a_device_has_its_own_minimum(values, limits, reason):
    """The bounds for 100 clients with the defaults are 40 neighbors and a threshold of 21."""
    set_task_identity()
    configs = {client_side.SECAGG_CONFIG_KEY: ConfigRecord({**HUNDRED, **values})}
    message = Message(RecordDict(configs), 2, "train")

    def reply(limits):
        state = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
        return client_side.secagg_reply(message, state, lambda: pytest.fail("it trained"), limits)

    if reason:
        with pytest.raises(RequestRefused, match=reason):
            reply(Limits(**limits))
    else:
        assert reply(Limits(**limits)).has_content()
    assert reply(None).has_content()  # a simulated client has no limits


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
    overrides = [
        "dataset=folder",
        "dataset.size=8",
        "dataset.channels=1",
        "dataset.mean=[0.5]",
        "dataset.std=[0.5]",
    ]
    overrides += ["encoder.width=4", "local_epochs=1", "rounds=1", "num_clients=3", "threads=1", *SECURE]
    overrides += ["secure_aggregation.dropout_fraction=0"]
    grid = Devices(*contexts)
    components = build_run(grid, compose([*overrides, f"output_dir={tmp_path / 'run'}"]))
    _, report = run_round(components.make_exchange(grid, no_activity), lambda: components.federation, ServerState())
    assert [row.client for row in report.clients] == [0, 1, 2]
