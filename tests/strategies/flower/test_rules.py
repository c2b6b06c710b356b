"""The strategies in Flower's loop with a plain ClientApp, against our own apps: the same bits."""

from functools import partial

import numpy as np
import pytest

from fedssl.flower_internals import SERVER_NODE
from simulation.grid import LocalGrid
from strategies.flower import EUA, EUC, LDAWA, MDAWA, FedEMA, FedU, LayerWise, LossWeighted, base
from strategies.flower.client import NUMBERS
from strategies.flower.replies import SetupError
from tests.federation import Federation
from tests.strategies.flower.apps import app_of, plain_client_app, run

BYOL = ("method=byol", "encoder.width=4")
PARTS = {"encoder": "encoder", "predictor": "predictor"}
VIT = ("encoder=vit_tiny", "encoder.depth=3", "encoder.width=8", "encoder.heads=2", "encoder.patch=4")
LAYER = "encoder.encoder.layers.encoder_layer_"
STAGES = [["encoder.class_token", "encoder.conv_proj", f"{LAYER}0"], f"{LAYER}1", f"{LAYER}2."]
CASES = {
    "l_dawa": (LDAWA(), ["strategy=l_dawa"]),
    "l_dawa loss": (
        LDAWA(weighting="loss", buffers="scale", normalize=True, warmup_rounds=1),
        [
            "strategy=l_dawa",
            *(f"strategy.{w}" for w in ("weighting=loss", "buffers=scale", "normalize=true", "warmup_rounds=1")),
        ],
    ),
    "l_dawa client": (LDAWA(scale_at="client"), ["strategy=l_dawa", "strategy.scale_at=client"]),
    "m_dawa": (MDAWA(), ["strategy=m_dawa"]),
    "loss_weighted": (LossWeighted(loss_key="train_loss"), ["strategy=loss_weighted"]),
    "eua": (EUA(), ["strategy=eua"]),
    "euc": (EUC(interval=2), ["strategy=euc", "strategy.interval=2"]),
    "fedu": (FedU(**PARTS, predictor_threshold=0.036), ["strategy=fedu", "strategy.predictor_threshold=0.036", *BYOL]),
    "fedema": (FedEMA(**PARTS), ["strategy=fedema", *BYOL]),
    "layer_wise": (LayerWise(stages=STAGES, rounds=4), ["strategy=fedavg", "schedule=layer_wise", "rounds=4", *VIT]),
}


HEAVY = ("l_dawa", "l_dawa client", "m_dawa", "loss_weighted", "eua", "fedema", "layer_wise")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.heavy) if n in HEAVY else n for n in CASES])
def test_the_same_training_gives_the_bits_of_our_apps(tmp_path, monkeypatch, name):
    strategy, overrides = CASES[name]
    rest = [word for word in overrides if not word.startswith("strategy")]
    ours = Federation(tmp_path / "a", *overrides)
    start = ours.components.context.initial_model().layers
    monkeypatch.setattr(base, "order_of", lambda reply: reply.node)  # that of our apps: by client
    expected = ours.run(4)
    plain = Federation(tmp_path / "b", "strategy=fedavg", *rest)
    plain.run(1)
    grid = LocalGrid(plain_client_app(plain.plans[0]), num_clients=3)
    result, _ = run(strategy, None, start, clients=3, rounds=4, grid=grid)
    assert result.keys() == expected.keys()
    for layer, array in expected.items():
        assert result[layer].dtype == array.dtype
        assert np.array_equal(result[layer], array), layer
    if name in ("fedu", "fedema"):  # each client has decided, or has a share of its own weights
        numbers = [context.state.metric_records[NUMBERS] for context in grid._contexts.values()]
        assert all(number["distance"] > 0 for number in numbers)
        decided = {number["distance"] < strategy.task.predictor_threshold for number in numbers}
        assert decided == {True, False} if name == "fedu" else all(number["lambda"] > 0 for number in numbers)


# Three clients; a is the model and moves by its client's number plus one in each round.
START = {"a.weight": np.array([3.0, 4.0], np.float32), "b.weight": np.array([12.0, 0.0], np.float32)}


def moved(client, round, layers, config):
    return {name: array + array.dtype.type(client + 1) for name, array in layers.items()}


def test_arrays_of_any_name_and_dtype_stay_what_they_are():
    layers = {
        "0": np.array([3.0, 4.0], np.float16),
        "1": np.zeros(2, np.float32),  # cosine 1: a plain mean
        "2": np.array(7),
        "3": np.array([True, False]),
        "4": np.array([2.0, 4.0]),
    }

    def train(client, round, layers, config):
        return layers | {"1": layers["1"] + np.float32(client + 1), "2": layers["2"] + 2 * client + 1}

    result, _ = run(LDAWA(statistics="4"), app_of(train, mods=()), layers)
    assert {name: array.dtype for name, array in result.items()} == {n: a.dtype for n, a in layers.items()}
    # Means: (1 + 2) / 2 = 1.5, and 7 + (1 + 3) / 2 = 9. The others did not move, and their cosines are 1.
    expected = layers | {"1": np.full(2, 1.5), "2": 9}
    assert all(np.array_equal(result[name], array) for name, array in expected.items())


def test_statistics_are_averaged_and_not_scaled():
    # The norm is 5 for both clients, the cosine with (3, 4) is 24/25 for (4, 3) and 1 for (3, 4).
    # Weights: ((4, 3) 0.96 + (3, 4)) / 2 = (3.42, 3.44). Statistics: the mean (3.5, 3.5).
    def train(client, round, layers, config):
        return {name: array[::-1] if client else array for name, array in layers.items()}

    vector = np.array([3.0, 4.0], np.float32)
    layers = {"w": vector, "bn.running_var": vector, "batch_stats/mean": vector}
    result, _ = run(LDAWA(statistics=["batch_stats"]), app_of(train, mods=()), layers)
    assert result["w"] == pytest.approx([3.42, 3.44])
    assert result["bn.running_var"] == pytest.approx([3.5, 3.5])
    assert result["batch_stats/mean"] == pytest.approx([3.5, 3.5])


@pytest.mark.parametrize("strategy", [LDAWA(), MDAWA(), LossWeighted(), EUA(), EUC(), FedU(encoder="a", predictor="b")])
def test_one_client_and_one_layer_work(strategy):
    layers = START if strategy.task.predictor else {"a.weight": START["a.weight"]}
    result, _ = run(strategy, app_of(lambda client, round, layers, config: layers), layers, clients=1, rounds=3)
    assert all(result[name] == pytest.approx(array) for name, array in layers.items())


def test_results_do_not_depend_on_the_order_of_replies():
    layers = {"w": np.random.default_rng(0).standard_normal(100).astype(np.float32)}

    def train_in(order):
        def train(client, round, layers, config):
            noise = np.random.default_rng([order[client], round]).standard_normal(100)
            return {"w": layers["w"] + noise.astype(np.float32)}

        return run(LDAWA(), app_of(train, mods=()), layers, clients=7, rounds=2)[0]["w"]

    assert np.array_equal(train_in(range(7)), train_in([3, 6, 1, 0, 5, 2, 4]))


class Counting(LocalGrid):
    """The local engine, which keeps the names of the arrays of all messages to train, in order of the nodes."""

    def __init__(self, app, *, num_clients):
        super().__init__(app, num_clients=num_clients)
        self.sent = []

    def push_messages(self, messages):
        messages = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        self.sent += [sorted(m.content["arrays"]) for m in messages if m.metadata.message_type == "train"]
        return super().push_messages(messages)


# a is averaged in every second round from round 2 on; no other weight has two dimensions.
KEPT = {"a": np.zeros((2, 2), np.float32), "b": np.zeros(4, np.float32)}


def moves(client, round, layers, config):
    """Client 0 stays where it is, and client 1 moves a by 1 and b by 3."""
    return {"a": layers["a"] + np.float32(client), "b": layers["b"] + np.float32(3 * client)}


def test_layers_that_clients_keep_are_not_sent_but_trained():
    seen = {}

    def train(client, round, layers, config):
        seen[round, client] = float(layers["a"][0, 0]), float(layers["b"][0])
        return moves(client, round, layers, config)

    grid = Counting(app_of(train), num_clients=2)
    result, outcome = run(EUC(fraction_evaluate=0.0), None, KEPT, rounds=4, grid=grid)
    assert grid.sent == [["a", "b"]] * 6 + [["b"]] * 2  # in round 4 nothing has averaged a since the last download
    assert [outcome.train_metrics_clientapp[round]["synced-layers"] for round in (1, 2, 3, 4)] == [2, 2, 1, 2]
    # Averages: a is 0.5 and 1, b is 1.5, 3 and 4.5. Client 1 has a = 1 + 1 after round 3.
    assert [seen[4, client] for client in (0, 1)] == [(1.0, 4.5), (2.0, 4.5)]
    assert (result["a"] == 2).all()  # (1 + 3) / 2
    assert (result["b"] == 6).all()  # (4.5 + 7.5) / 2


def test_a_round_may_average_nothing():
    result, _ = run(EUC(fraction_evaluate=0.0), app_of(moves), {"a": KEPT["a"], "b": KEPT["a"]}, rounds=4)
    assert (result["a"] == 2).all()  # as if it was averaged in every round, because the moves do not depend on a
    assert (result["b"] == 6).all()


def test_a_client_that_lost_its_state_receives_everything_again(caplog):
    class Forgetting(Counting):
        def push_messages(self, messages):
            if len(self.sent) == 6:  # before round 4
                self._contexts[SERVER_NODE + 1].state.clear()
            return super().push_messages(messages)

    grid = Forgetting(app_of(moves), num_clients=2)
    run(EUC(fraction_evaluate=0.0), None, KEPT, rounds=6, grid=grid)
    assert "error: the client has not kept the arrays that the server did not send" in caplog.text
    assert grid.sent[6:8] == [["b"], ["b"]]
    # Round 4 has one reply, which cannot differ from its average: a is averaged in every round until round 6.
    assert grid.sent[8:] == [["a", "b"]] * 4


def test_stages_advance_and_start_with_the_weights_before_them():
    layers = {f"net.{n}.w": np.full(2, float(n), np.float32) for n in (1, 2, 10)} | {"head": np.zeros(1, np.float32)}
    seen = []

    def train(client, round, layers, config):
        seen.append((config["num-stages"], config["num-frozen-stages"], float(layers["net.2.w"][0])))
        return {name: array + np.float32(1) for name, array in layers.items()}  # also of stages that are not trained

    strategy = LayerWise(stages=["net.1", "net.2", "net.10"], rounds=3)
    result, _ = run(strategy, app_of(train), layers, clients=1, rounds=3)
    assert seen == [(1, 0, 2.0), (2, 1, 2.0), (3, 2, 3.0)]  # 1 + 1 is copied to stage 2, which becomes 3
    assert [float(result[f"net.{n}.w"][0]) for n in (1, 2, 10)] == [2.0, 3.0, 4.0]
    assert result["head"] == [3.0]


def test_rounds_without_a_usable_reply_do_not_lose_the_transfer():
    """Stage 2 is never trained: it starts twice as stage 1 ended, with 1 + 1, and so does stage 3 after it."""
    layers = {f"net.{n}.w": np.full(2, value, np.float32) for n, value in ((1, 1.0), (2, 7.0), (3, 9.0))}
    seen = []

    def train(client, round, layers, config):
        seen.append([float(array[0]) for array in layers.values()])
        return {name: array + np.float32(np.nan if round in (2, 3) else 1) for name, array in layers.items()}

    strategy = LayerWise(stages=["net.1", "net.2", "net.3"], rounds=4, rounds_per_stage=[1, 2, 1])
    result, _ = run(strategy, app_of(train), layers, clients=1, rounds=4)
    assert seen == [[1, 7, 9], [2, 2, 9], [2, 2, 9], [2, 2, 2]]
    assert [float(array[0]) for array in result.values()] == [2, 2, 3]


def test_local_arrays_stay_on_their_client_also_for_evaluation():
    def train(client, round, layers, config):
        return {"head": layers["head"] + np.float32(client + 1), "body": layers["body"] + np.float32(client)}

    layers = {"head": np.zeros(1, np.float32), "body": np.ones(1, np.float32)}
    result, outcome = run(LossWeighted(local="head"), app_of(train), layers, rounds=3)
    assert result["head"] == [0.0]
    # The clients' own heads are 3 and 6 after three rounds; evaluation averages what they report.
    assert [outcome.evaluate_metrics_clientapp[round]["first"] for round in (1, 2, 3)] == [1.5, 3.0, 4.5]


def test_a_second_start_continues_with_what_clients_have_kept():
    strategy, seen = LayerWise(stages=["a", "b"], rounds=2), []
    app = app_of(lambda client, round, layers, config: seen.append(config["num-stages"]) or layers)
    grid = LocalGrid(app, num_clients=1)
    for _ in range(2):
        run(strategy, app, START, clients=1, grid=grid)
    assert seen == [1, 2]


def test_local_arrays_of_the_encoder_are_in_no_distance():
    """The kernel moves by 1 a round: d = sqrt(4) = 2 for its four weights, below and above the threshold."""

    def train(client, round, layers, config):
        return {name: array + np.float32(9 if name == "encoder.bn" else 1) for name, array in layers.items()}

    kernel = np.zeros((1, 1, 2, 2), np.float32)
    layers = {"encoder.conv": kernel, "encoder.bn": np.zeros(1, np.float32), "predictor": np.zeros(1, np.float32)}
    for threshold in (1.9, 2.1):
        strategy = FedU(encoder="encoder", predictor="predictor", local="encoder.bn", predictor_threshold=threshold)
        grid = LocalGrid(app_of(train), num_clients=2)
        result, _ = run(strategy, None, layers, rounds=4, grid=grid)
        assert result["encoder.conv"].tolist() == [[[[4, 4], [4, 4]]]]
        kept = [context.state.metric_records[NUMBERS]["distance"] for context in grid._contexts.values()]
        assert kept == [2, 2]


@pytest.mark.parametrize(
    "strategy", [EUC, partial(FedU, encoder="a", predictor="b"), partial(LDAWA, scale_at="client")]
)
def test_clients_may_keep_local_arrays_themselves(strategy):
    def train(client, round, layers, config):
        return {name: array + np.float32(1) for name, array in layers.items() if name != "target"}

    layers = START | {"target": np.zeros(1, np.float32)}
    result, _ = run(strategy(local="target"), app_of(train), layers, rounds=3)
    assert result["target"] == [0]
    assert not np.array_equal(result["a.weight"], START["a.weight"])


def test_the_reason_of_an_incomplete_reply_is_its_own():
    app = app_of(lambda client, round, layers, config: {"a.weight": layers["a.weight"]})
    for strategy in (FedU(encoder="a", predictor="b"), LayerWise(stages=["a", "b"], rounds=2)):
        with pytest.raises(SetupError, match="b.weight.*; name arrays that stay on the clients in local="):
            run(strategy, app, START)
