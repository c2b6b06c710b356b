"""FedAvg: the weighted mean of the clients' models (McMahan et al., AISTATS 2017; Eq. 1 of L-DAWA).

Counters such as ``num_batches_tracked`` are rounded to the nearest integer and keep their dtype; common implementations
average them as floating-point numbers, which loading then truncates.
"""

from collections.abc import Callable, Sequence
from functools import partial

from fedssl.arrays import GlobalLayers, Layers
from fedssl.config.constraints import check_arguments
from fedssl.wire.messages import ClientUpdate
from strategies.aggregate import aggregate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.weighted_sum import WeightedSum


def fedavg(
    global_layers: Layers | GlobalLayers, updates: Sequence[ClientUpdate], *, weighting: str = "examples"
) -> Layers:
    """Return the new global layers: the weighted mean of every layer of the clients' models.

    ``global_layers`` are those from which the clients started. They define names, order, shapes and dtypes;
    `GlobalLayers` may have pairs of factors (LoRA). ``updates`` are one per client, in any order. NaN in an update
    gives NaN in the result. ``weighting`` is "examples", beta_k = n_k / sum n, or "uniform", 1 / K for the K received
    updates. Raise `InputError` without updates, for an invalid option, for a layer that does not fit or has non-finite
    values that the rule cannot use, and for a missing metric.
    """
    return aggregate(global_layers, updates, make_weighted_mean(weighting)(), needs_cosines=False)  # Eq. 1


class FedAvg(FedSSLStrategy):
    r"""Federated averaging; see `fedavg`.

    $$
    w = \sum_k \beta_k w_k \qquad \beta_k = \frac{n_k}{\sum_j n_j} \;\text{or}\; \frac{1}{K}
    $$

    with $w_k$ the model of client k after its training, $n_k$ its images (``weighting``), and K clients with valid
    updates.
    """

    def __init__(self, *, weighting: str = "examples") -> None:
        super().__init__(ServerStrategy(make_weighted_mean(weighting)))


def make_weighted_mean(weighting: str) -> Callable[[], WeightedSum]:
    """Return a factory of averaging aggregators. Raises `InputError` for an unknown weighting."""
    check_arguments("strategy", weighting=weighting)
    return partial(WeightedSum, weighting=weighting)
