"""Rounds of SecAgg+: exact sums with dropouts in every phase, Flower's own client and server, and invalid replies."""

import logging
import random
from functools import partial

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Parameters, Status
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from benchmarks.secure_aggregation import fedssl_app, flower_app, run_fedssl, run_flower
from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.secure_aggregation.flower_internals import generate_key_pairs, public_key_to_bytes
from fedssl.secure_aggregation.masks import dequantized_mean, quantize, rounding_generator
from fedssl.secure_aggregation.protocol import PHASES, SECAGG_CONFIG_KEY, TARGET_RANGE
from fedssl.secure_aggregation.server import TooFewParticipants, secure_mean_delta
from server_app.messaging import ClientMessenger
from simulation.grid import LocalGrid
from tests.arrays import archive, npy

LENGTH, CLIENTS = 50, 20  # 10 neighbors and a threshold of 6
DEFAULTS = SecureAggregationSettings(clipping_range=8.0)
FLOWERS = SecureAggregationSettings(clipping_range=8.0, mask_generator="mt19937", security_bits=28)


def delta_of_node(node):
    return np.random.default_rng(node).normal(0, 0.1, LENGTH)


def quantized_mean(nodes):
    """The mean of the plain quantized updates: no masks, no modulus."""
    vectors = [
        quantize(delta, rounding_generator(delta), clipping_range=8.0, target_range=TARGET_RANGE).astype(np.int64)
        for delta in map(delta_of_node, nodes)
    ]
    total, count = sum(vectors), len(vectors)
    ranges = {"clipping_range": 8.0, "target_range": TARGET_RANGE}
    return dequantized_mean(total, clients=count, total_weight=count * TARGET_RANGE, **ranges)


class LossyMessenger(ClientMessenger):
    """Messenger that loses or changes replies. Messages of lost nodes are not sent in later phases either."""

    def __init__(self, grid, lost=(), change=None):
        super().__init__(grid)
        self._lost, self._change, self._phase = dict(lost), change, -1

    def send_and_receive(self, messages, **options):
        self._phase += 1
        phase = PHASES[self._phase]
        messages = list(messages)
        random.Random(self._phase).shuffle(messages)
        for message, reply in super().send_and_receive(messages, **options):
            node = message.metadata.dst_node_id
            if self._lost.get(node) != phase:
                if self._change:
                    self._change(phase, node, reply)
                yield message, reply


def secure_mean(lost=(), *, change=None, settings=DEFAULTS, app=None, clients=CLIENTS, max_weight=1):
    grid = LocalGrid(app or fedssl_app(delta_of_node), num_clients=clients)
    contents = {node: RecordDict() for node in grid.get_node_ids()}
    exchange = LossyMessenger(grid, lost, change)
    send = partial(exchange.send_and_receive, timeout=60)
    return secure_mean_delta(send, contents, settings, length=LENGTH, round=1, max_weight=max_weight)


def images_of_node(node):
    return 3 * node**2  # from 12 to 1,323 for 20 nodes


@pytest.mark.parametrize("lost", [{}, {5: "collect_masked_vectors", 20: "share_keys"}])
@pytest.mark.parametrize("client", ["fedssl", "Flower"])
def test_the_weighted_mean_is_that_of_the_plain_updates(client, lost):
    """Values err by a step of 2 * 8 / 2^22, and weights by half of one, times the largest over the mean weight."""
    settings = FLOWERS if client == "Flower" else DEFAULTS
    app = (flower_app if client == "Flower" else fedssl_app)(delta_of_node, images_of_node)
    result = secure_mean(lost, settings=settings, app=app, max_weight=1400)
    assert result.nodes == [node for node in range(2, 22) if node not in lost]
    weights = np.array([images_of_node(node) for node in result.nodes], np.float64)
    deltas = np.array([delta_of_node(node) for node in result.nodes])
    expected = (weights[:, None] * deltas).sum(axis=0) / weights.sum()
    bound = 1.5 * (2 * 8 / TARGET_RANGE) * 1400 / weights.mean()
    np.testing.assert_allclose(result.delta, expected, rtol=0, atol=bound)
    assert np.abs(result.delta - deltas.mean(axis=0)).max() > 100 * bound  # it is not the mean with equal weights


@pytest.mark.parametrize("clients", [4, 20])
@pytest.mark.parametrize("settings", [DEFAULTS, FLOWERS])
def test_the_sum_is_exact(clients, settings):
    result = secure_mean(clients=clients, settings=settings)
    assert result.nodes == list(range(2, 2 + clients))
    assert np.array_equal(result.delta, quantized_mean(result.nodes))
    assert result.dropped == {}


@pytest.mark.parametrize("phase", PHASES)
def test_the_sum_is_exact_up_to_the_dropout_fraction(phase):
    """4 of 20 clients. Before the masked vector they are not in the sum, and before unmask they are."""
    lost = [3, 8, 9, 20]
    result = secure_mean(dict.fromkeys(lost, phase))
    alive = [node for node in range(2, 22) if node not in lost or phase == "unmask"]
    assert result.nodes == alive
    assert np.array_equal(result.delta, quantized_mean(alive))
    assert result.dropped == ({} if phase == "unmask" else dict.fromkeys(lost, "no reply in time"))


@pytest.mark.parametrize("phase", PHASES[:3])
def test_beyond_the_fraction_the_round_fails(phase):
    with pytest.raises(TooFewParticipants, match=rf"15 of 20 after the phase {phase}, and 16 are needed \(no reply in"):
        secure_mean(dict.fromkeys(range(2, 7), phase))


def with_fit_result(app):
    """The app with the result that Flower's strategies of the older interface expect beside the masked vector."""
    adapted = ClientApp()

    @adapted.train()
    def train(message, context):
        reply = app(message, context)
        result = FitRes(Status(Code.OK, ""), Parameters([], ""), 1, {})
        return Message(RecordDict({**reply.content, **fitres_to_recorddict(result, False)}), reply_to=message)

    return adapted


@pytest.mark.parametrize(("server", "client"), [("Flower", "fedssl"), ("fedssl", "Flower")])
def test_flowers_client_and_server_have_the_same_wire_format(server, client, caplog):
    caplog.set_level(logging.ERROR, "flwr")  # until the end of the test
    app = (fedssl_app if client == "fedssl" else flower_app)(delta_of_node)
    if (server, client) == ("Flower", "fedssl"):
        app = with_fit_result(app)
    mean, _ = (run_fedssl if server == "fedssl" else run_flower)(app, 10, FLOWERS, length=LENGTH)
    plain = np.mean([delta_of_node(node) for node in range(2, 12)], axis=0)
    np.testing.assert_allclose(mean, plain, atol=2 * 8 / TARGET_RANGE)
    if client == "fedssl":  # Flower's client rounds with the global generator
        assert np.array_equal(mean, quantized_mean(range(2, 12)))


def values_of(reply):
    return reply.content.config_records[SECAGG_CONFIG_KEY]


KEY = public_key_to_bytes(generate_key_pairs()[1])
OTHER_CURVE = public_key_to_bytes(ec.generate_private_key(ec.SECP256R1()).public_key())
OTHER_KIND = public_key_to_bytes(ed25519.Ed25519PrivateKey.generate().public_key())
WEIGHT, ZEROS = npy(np.array([TARGET_RANGE], np.uint32)), np.zeros(LENGTH + 1, np.uint32)
INVALID = {
    "setup": [
        ({"pk1": 3}, "it sent no public keys"),
        ({"pk2": b"no key"}, "it sent no public keys"),
        ({"pk1": OTHER_CURVE}, "it sent no public keys"),
        ({"pk2": OTHER_KIND}, "it sent no public keys"),
        ({"pk1": b"x" * 1_000_000 + KEY}, "it sent no public keys"),
        ({"mask_generator": "mt19937"}, "it masks with mt19937 but"),
    ],
    "share_keys": [
        ({"dsts": [2]}, "it sent no lists dsts and ctxts of the same length"),
        ({"dsts": [], "ctxts": []}, "it sent shares for other nodes than its neighbors"),
        (lambda sent: {"ctxts": [b"x" * 2000 for _ in sent["ctxts"]]}, "it sent shares of more than 1024 bytes"),
    ],
    "collect_masked_vectors": [
        ({"masked_params": []}, "it sent no masked update"),
        ({"masked_params": [b"x", b"y"]}, "it sent no masked update"),
        ({"masked_params": 3}, "it sent no masked update"),
        ({"masked_params": [WEIGHT, archive(ZEROS[1:])]}, "it sent no masked update"),
        ({"masked_params": [WEIGHT, npy(ZEROS[1:], shape=(10**12,))]}, "it sent no masked update"),
        ({"masked_params": [WEIGHT, npy(ZEROS)]}, "its masked update is no vector of 50 integers"),
    ],
    "unmask": [
        ({"nids": [], "shares": []}, "it sent shares of other nodes than its neighbors"),
        ({"shares": [1, 2]}, "it sent no lists nids and shares of the same length"),
        *(
            (lambda sent, share=share: {"shares": [share for _ in sent["shares"]]}, "it sent a malformed share")
            for share in (b"", bytes(52), b"\1" + bytes(10_000_000))  # the second has the index 0
        ),
    ],
}


CASES = [(phase, *case) for phase, cases in INVALID.items() for case in cases]


@pytest.mark.parametrize(("phase", "values", "reason"), CASES)
def test_an_invalid_reply_drops_its_client(phase, values, reason):
    def change(found, node, reply):
        if (found, node) == (phase, 7):
            sent = values_of(reply)
            sent.update(values(sent) if callable(values) else values)

    result = secure_mean(change=change, clients=10)
    reported = result.unused_shares if phase == "unmask" else result.dropped  # then its update is in the sum already
    assert reported.keys() == {7}
    assert reason in reported[7]
    assert (7 in result.nodes) == (phase == "unmask")
    assert len(result.dropped) == (phase != "unmask")
    assert [cost.invalid for cost in result.phases.values()] == [name == phase for name in PHASES]
    assert np.array_equal(result.delta, quantized_mean(result.nodes))


def test_a_public_key_that_is_used_twice_drops_its_client():
    publics = []

    def change(phase, node, reply):
        if phase == "setup":
            publics.append(values_of(reply)["pk1"])
            if len(publics) == 2:
                values_of(reply)["pk2"] = publics[0]

    result = secure_mean(change=change, clients=10)
    assert list(result.dropped.values()) == ["it sent a public key twice, or that of another client"]
    assert np.array_equal(result.delta, quantized_mean(result.nodes))


WRONG = {
    "reversed": lambda share: share[:4] + share[:3:-1],
    "one bit": lambda share: share[:4] + bytes([share[4] ^ 1]) + share[5:],
    "of another": lambda share: (share[0] % 11 + 1).to_bytes(4, "little") + share[4:],
}


def sends_wrong_shares(*nodes, wrong):
    def change(phase, node, reply):
        if phase == "unmask" and node in nodes:
            values_of(reply)["shares"] = [wrong(share) for share in values_of(reply)["shares"]]

    return change


@pytest.mark.parametrize("lost", [{}, {5: "collect_masked_vectors", 20: "unmask"}])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_shares_of_one_client_are_not_used(wrong, lost):
    """Each client has 11 shares of which 6 reveal a secret, so that one that disagrees with the others is found."""
    result = secure_mean(lost, change=sends_wrong_shares(7, wrong=WRONG[wrong]))
    assert result.unused_shares == {7: "it sent wrong shares"} | ({20: "no reply in time"} if lost else {})
    assert 7 in result.nodes
    assert np.array_equal(result.delta, quantized_mean(result.nodes))


def test_wrong_shares_of_all_end_the_round():
    change = sends_wrong_shares(*range(2, 12), wrong=WRONG["reversed"])
    with pytest.raises(TooFewParticipants, match="received wrong shares of the secret of node .*: the shares do not"):
        secure_mean(change=change, clients=10)


@pytest.mark.parametrize("number", [1, 5])
def test_shares_that_a_neighbor_cannot_read_are_missing(number):
    """Node 7 sends garbage to some of its 10 neighbors. With its own, at least 6 shares of its secret are left."""

    def change(phase, node, reply):
        if (phase, node) == ("share_keys", 7):
            texts = values_of(reply)["ctxts"]
            values_of(reply)["ctxts"] = [b"x" * 612] * number + texts[number:]

    result = secure_mean(change=change)
    assert result.dropped == {}
    assert result.unused_shares == {7: "its neighbors could not read its shares"}
    assert np.array_equal(result.delta, quantized_mean(range(2, 22)))
    number = 6
    with pytest.raises(TooFewParticipants, match=r"needed \(its neighbors could not read its shares\)"):
        secure_mean(change=change)


def test_secrets_are_deleted_after_the_last_phase():
    grid = LocalGrid(fedssl_app(delta_of_node), num_clients=4)
    contents = {node: RecordDict() for node in grid.get_node_ids()}
    send = partial(ClientMessenger(grid).send_and_receive, timeout=60)
    secure_mean_delta(send, contents, DEFAULTS, length=LENGTH, round=1)
    for context in grid._contexts.values():
        (record,) = context.state.config_records.values()
        assert isinstance(record, ConfigRecord)
        assert not any(value for name, value in record.items() if name != "phase")


def test_costs_of_the_phases_and_bytes_of_the_clients():
    result = secure_mean()
    assert list(result.phases) == list(PHASES)
    assert all(cost.seconds > 0 and cost.bytes_down > 0 and cost.bytes_up > 0 for cost in result.phases.values())
    for total, name in ((result.bytes_down, "bytes_down"), (result.bytes_up, "bytes_up")):
        assert sum(total.values()) == sum(getattr(cost, name) for cost in result.phases.values())
    # A masked vector has 4 bytes per value, two headers of NumPy of 128 bytes, and names.
    headers = result.phases["collect_masked_vectors"].bytes_up / CLIENTS - 4 * (LENGTH + 1)
    assert 2 * 128 < headers < 1000
