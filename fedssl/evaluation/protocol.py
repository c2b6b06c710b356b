"""The interface of evaluation protocols, and a protocol that combines several."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from fedssl.errors import InputError
from fedssl.evaluation.evaluation_input import EvaluationInput
from fedssl.evaluation.scores import Score, as_scores
from fedssl.machine.memory import available_memory, gigabytes


class EvaluationProtocol(ABC):
    """An evaluation protocol: from an encoder and labeled images to results, under keys that name the protocol.

    A result is a `Score`, or a plain number, which is an accuracy in [0, 1]. Random draws depend on ``seed`` and the
    labels only, so that representations are compared on the same draws. A protocol that cannot evaluate raw pixels
    returns no result for them.

    Attributes
    ----------
    trains_network : bool
        Whether it runs or trains a network by itself. Such a protocol uses torch's random generator and memory of the
        GPU, so it is not run beside training.
    uses_features : bool
        Whether it uses `EvaluationInput.features`. Their memory is checked before the first round.
    """

    trains_network: bool = False
    uses_features: bool = True

    @abstractmethod
    def __call__(self, subject: EvaluationInput, *, seed: int) -> Mapping[str, Score | float]:
        """Evaluate an encoder."""

    @abstractmethod
    def result_units(self, num_classes: int) -> Mapping[str, str]:
        """Return the unit of each result for an encoder, see `fedssl.evaluation.scores.Score`."""

    def validate(self, subject: EvaluationInput, *, feature_dim: int) -> None:
        """Refuse images that the protocol cannot use; raises `InputError`. Called before the first round."""
        if self.uses_features:
            check_feature_memory(subject, feature_dim=feature_dim)


def evaluate(protocol: EvaluationProtocol, subject: EvaluationInput, *, seed: int) -> dict[str, Score]:
    """Run a protocol and return its results as scores."""
    return as_scores(protocol(subject, seed=seed))


def check_protocol(protocol: object) -> EvaluationProtocol:
    """Return the protocol; raises `InputError` if it is something else."""
    if not isinstance(protocol, EvaluationProtocol):
        raise InputError(
            f"{type(protocol).__name__} is no evaluation protocol; derive it from "
            "fedssl.evaluation.protocol.EvaluationProtocol"
        )
    return protocol


def check_feature_memory(subject: EvaluationInput, *, feature_dim: int) -> None:
    """Refuse training images whose features would not fit into memory; raises `InputError`."""
    count = len(subject.train.labels)
    needed = 2 * 4 * feature_dim * count  # float32, twice where a protocol scales them
    available = available_memory()
    if available is not None and needed > available:
        raise InputError(
            f"{count:,} training images with features of length {feature_dim} need {gigabytes(needed)} of memory to be "
            f"evaluated, and {gigabytes(available)} are available; name another split with dataset.splits.train=NAME, "
            "set dataset.limit, or choose evaluation=none and final_evaluation=none"
        )


class CombinedProtocol(EvaluationProtocol):
    """All ``protocols`` in order, with their results together. Without any there is no result."""

    def __init__(self, *, protocols: Mapping[str, EvaluationProtocol]) -> None:
        self.protocols = {name: check_protocol(protocol) for name, protocol in protocols.items()}
        self.trains_network = any(protocol.trains_network for protocol in self.protocols.values())
        self.uses_features = any(protocol.uses_features for protocol in self.protocols.values())

    def __call__(self, subject: EvaluationInput, *, seed: int) -> dict[str, Score]:
        """Evaluate by all protocols."""
        results: dict[str, Score] = {}
        for protocol in self.protocols.values():
            results |= evaluate(protocol, subject, seed=seed)
        return results

    def result_units(self, num_classes: int) -> dict[str, str]:
        """Return the units of all protocols."""
        return {
            name: unit
            for protocol in self.protocols.values()
            for name, unit in protocol.result_units(num_classes).items()
        }

    def validate(self, subject: EvaluationInput, *, feature_dim: int) -> None:
        """Validate by all protocols."""
        for protocol in self.protocols.values():
            protocol.validate(subject, feature_dim=feature_dim)
