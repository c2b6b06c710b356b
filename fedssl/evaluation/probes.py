"""Several evaluation protocols as one."""

from collections.abc import Mapping
from typing import Protocol

from fedssl.evaluation.features import Features


class Evaluation(Protocol):
    """An evaluation protocol: features to accuracies in [0, 1], under keys that name the protocol.

    What it draws at random depends on ``seed`` and the labels only, so representations are compared on the same draws.
    """

    def __call__(self, data: Features, *, seed: int) -> dict[str, float]: ...


class Probes:
    """Every protocol of ``protocols`` in turn; their results together. None of them: no result."""

    def __init__(self, *, protocols: Mapping[str, Evaluation]) -> None:
        self.protocols = dict(protocols)

    def __call__(self, data: Features, *, seed: int) -> dict[str, float]:
        return {name: value for run in self.protocols.values() for name, value in run(data, seed=seed).items()}
