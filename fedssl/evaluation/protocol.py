"""What an evaluation protocol is, and several of them as one."""

from collections.abc import Mapping
from typing import Protocol

from fedssl.evaluation.evaluation_input import EvaluationInput
from fedssl.evaluation.scores import Score, as_scores


class DryRunStop(Exception):
    """Raised by who calls protocols only to hear what they refuse, where a network is to compute."""


class EvaluationProtocol(Protocol):
    """An evaluation protocol: a subject to results, under keys that name the protocol.

    A result is a `Score`, or a plain number, which is taken as an accuracy in [0, 1]. What is drawn at random depends
    on ``seed`` and the labels only, so representations are compared on the same draws. A protocol that cannot judge
    raw pixels returns nothing for them.
    """

    def __call__(self, subject: EvaluationInput, *, seed: int) -> Mapping[str, Score | float]:
        """Judge the subject."""


def evaluate(protocol: EvaluationProtocol, subject: EvaluationInput, *, seed: int) -> dict[str, Score]:
    """Run a protocol, whatever form its results have; a dry run has none of those for which a network computes."""
    try:
        return as_scores(protocol(subject, seed=seed))
    except DryRunStop:
        return {}


class CombinedProtocol:
    """Every protocol of ``protocols`` in turn; their results together. None of them: no result."""

    def __init__(self, *, protocols: Mapping[str, EvaluationProtocol]) -> None:
        self.protocols = dict(protocols)

    def __call__(self, subject: EvaluationInput, *, seed: int) -> dict[str, Score]:
        """Judge the subject by all protocols."""
        results: dict[str, Score] = {}
        for protocol in self.protocols.values():
            results |= evaluate(protocol, subject, seed=seed)
        return results
