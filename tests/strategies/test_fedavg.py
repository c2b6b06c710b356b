"""The strategies around FedAvg, Loss, L-DAWA and M-DAWA."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers
from fedssl.wire.messages import TrainPlan
from server_app.round import Round
from strategies.fedavg import FedAvg, fedavg
from strategies.l_dawa import LDAWA, l_dawa, scale_layers
from strategies.loss_weighted import LossWeighted, loss_weighted
from strategies.m_dawa import MDAWA, m_dawa
from strategies.types import CommunicationSummary
from tests.arrays import same
from tests.federation import Federation
from tests.strategies.made import CLIENTS, GLOBAL, clients_of, model


def ever_needed(strategy):
    """Metrics that the rule needs in some round, as people are told."""
    return strategy.server.describe_communication(
        CommunicationSummary(download="", upload="", required_metrics=("nothing of this",), local_state="")
    ).required_metrics


def run(strategy, round):
    reference = GlobalLayers(GLOBAL)
    rule = strategy.server.aggregator(round)
    rule.start(reference)
    for client in CLIENTS:
        rule.add(client, reference.cosines_of(client.layers))
    return rule.finish()


@pytest.mark.parametrize(
    ("strategy", "expected", "needs"),
    [
        (FedAvg(), fedavg, ("num-examples",)),
        (FedAvg(weighting="uniform"), partial(fedavg, weighting="uniform"), ()),
        (LossWeighted(), loss_weighted, ("train-loss",)),
        (LDAWA(), l_dawa, ()),
        (LDAWA(weighting="examples"), partial(l_dawa, weighting="examples"), ("num-examples",)),
        (LDAWA(weighting="loss"), partial(l_dawa, weighting="loss"), ("train-loss",)),
        (MDAWA(), m_dawa, ()),
    ],
)
def test_strategies_apply_their_rule_and_ask_for_its_metrics(strategy, expected, needs):
    assert ever_needed(strategy) == needs
    for round in (1, 2):  # nothing is left over from a round
        assert strategy.server.aggregator(round).required_metrics == needs
        assert same(run(strategy, round), expected(GLOBAL, CLIENTS))


@pytest.mark.parametrize("weighting", ["uniform", "examples", "loss"])
@pytest.mark.parametrize("buffers", ["average", "scale"])
def test_layers_scaled_by_the_clients_give_the_same_model(weighting, buffers):
    start = model(0)
    updates = clients_of(start)
    scaled = [replace(one, layers=scale_layers(start, one.layers, buffers=buffers)) for one in updates]
    strategy = LDAWA(weighting=weighting, buffers=buffers, scale_at="client")
    rule, reference = strategy.server.aggregator(1), GlobalLayers(start)
    rule.start(reference)
    for one in scaled:
        rule.add(one, reference.cosines_of(one.layers))
    result = rule.finish()
    for name, array in l_dawa(start, updates, weighting=weighting, buffers=buffers).items():
        assert result[name].dtype == array.dtype
        np.testing.assert_allclose(result[name], array, rtol=1e-6, atol=1e-6)
    assert same(updates[0].layers, clients_of(start)[0].layers)  # new arrays


@pytest.mark.parametrize(
    ("name", "kind", "metrics"),
    [
        ("fedavg", FedAvg, ("num-examples", "train-loss", "seconds")),
        ("loss_weighted", LossWeighted, ("train-loss", "seconds")),
        ("l_dawa", LDAWA, ("seconds",)),
        ("m_dawa", MDAWA, ("seconds",)),
    ],
)
def test_settings_build_the_strategy(tmp_path, name, kind, metrics):
    federation = Federation(tmp_path, f"strategy={name}")
    assert type(federation.strategy) is kind
    first = Round(federation.components.federation, federation.state)
    assert {TrainPlan.from_content(message.content).metrics for message in first.messages} == {metrics}


def test_warm_up():
    strategy = LDAWA(weighting="loss", warmup_rounds=2)
    assert ever_needed(strategy) == ("num-examples", "train-loss")
    by_loss = partial(l_dawa, weighting="loss")
    for round, expected in ((1, fedavg), (2, fedavg), (3, by_loss)):
        assert strategy.server.aggregator(round).required_metrics == (
            ("train-loss",) if round == 3 else ("num-examples",)
        )
        assert same(run(strategy, round), expected(GLOBAL, CLIENTS))
