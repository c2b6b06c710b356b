"""What rules refuse."""

from functools import partial

import numpy as np
import pytest

from fedssl.errors import InputError
from strategies.fedavg import FedAvg, fedavg
from strategies.l_dawa import LDAWA, l_dawa
from strategies.loss_weighted import loss_weighted
from strategies.m_dawa import MDAWA, m_dawa
from tests.strategies.made import CLIENTS, GLOBAL, every_rule, update


@every_rule
def test_updates_that_do_not_fit_are_refused(rule):
    missing, wrong, extra, kind = (dict(CLIENTS[0].layers) for _ in range(4))
    del missing["b"]
    wrong["b"] = np.zeros((1, 2), np.float32)
    extra["c"] = np.zeros(2, np.float32)
    kind["b"] = np.zeros(2, np.int64)
    for bad, reason in (
        (missing, "client 9: layer b is missing"),
        (wrong, r"client 9: layer b has shape \(1, 2\) instead of \(2,\)"),
        (extra, "client 9: layer c is not part of the global model"),
        (kind, "client 9: layer b has dtype int64 instead of float32"),
    ):
        with pytest.raises(InputError, match=reason):
            rule(GLOBAL, [CLIENTS[1], update(9, bad, 3, 1.0)])


@every_rule
def test_no_updates_are_refused(rule):
    with pytest.raises(InputError, match="at least one is needed"):
        rule(GLOBAL, [])


@pytest.mark.parametrize(
    ("rule", "client", "reason"),
    [
        (fedavg, update(9, GLOBAL), "client 9: num-examples is None"),
        (fedavg, update(9, GLOBAL, num_examples=0), "client 9: num-examples=0 is not positive"),
        (partial(l_dawa, weighting="examples"), update(9, GLOBAL, train_loss=1.0), "client 9: num-examples is None"),
        (partial(l_dawa, weighting="loss"), update(9, GLOBAL, num_examples=1), "client 9: train-loss is None"),
        (partial(l_dawa, weighting="loss"), update(9, GLOBAL, train_loss=np.nan), "client 9: train-loss is nan"),
        (loss_weighted, update(9, GLOBAL, num_examples=1), "client 9: train-loss is None"),
    ],
)
def test_metrics_that_are_missing_are_refused(rule, client, reason):
    with pytest.raises(InputError, match=reason):
        rule(GLOBAL, [CLIENTS[0], client])


def test_unknown_options_are_refused():
    for make in (partial(fedavg, GLOBAL, CLIENTS), FedAvg):
        with pytest.raises(InputError, match="^strategy.weighting=loss must be examples or uniform$"):
            make(weighting="loss")
    for make in (partial(l_dawa, GLOBAL, CLIENTS), LDAWA):
        with pytest.raises(InputError, match="^strategy.weighting=size must be examples or uniform or loss$"):
            make(weighting="size")
    for make in (partial(m_dawa, GLOBAL, CLIENTS), MDAWA, LDAWA):
        with pytest.raises(InputError, match="^strategy.buffers=drop must be average or scale$"):
            make(buffers="drop")
    with pytest.raises(InputError, match="^strategy.scale_at=phone must be server or client$"):
        LDAWA(scale_at="phone")
    with pytest.raises(InputError, match="^strategy.warmup_rounds=-1 must be an integer of at least 0$"):
        LDAWA(warmup_rounds=-1)
