"""Early stopping: a rule over the results of evaluations that ends a run before its last round.

The rule is a pure function of the recorded results, so that a resumed run ends in the same round as an uninterrupted
one.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY
from fedssl.rules import Problem


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Settings of early stopping."""

    monitor: str | None = None  # name of a result of ``evaluation``; higher is better. None disables early stopping
    # Number of consecutive evaluations without improvement after which the run ends, at least 1; None: unlimited.
    patience: int | None = None
    # Minimum increase over the best result that counts as an improvement; at least 0, in the unit of the result
    # (accuracies are in [0, 1]).
    min_delta: float = 0.0
    threshold: float | None = None  # the run ends when the result reaches this value; None: no threshold

    def __post_init__(self) -> None:
        if self.monitor is not None and not isinstance(self.monitor, str):
            raise InputError(f"early_stopping.monitor={self.monitor} must be the name of a result, e.g. knn, or null")
        has_criterion = self.patience is not None or self.threshold is not None
        if self.monitor is None and has_criterion:
            raise InputError(
                "early_stopping has a criterion but no monitor; set e.g. early_stopping.monitor=knn, or set "
                "early_stopping.patience and early_stopping.threshold to null"
            )
        if self.monitor is not None and not has_criterion:
            raise InputError(
                f"early_stopping.monitor={self.monitor} needs a criterion; set early_stopping.patience=3 or "
                "early_stopping.threshold=0.5"
            )


def stop_reason(evaluations: Iterable[tuple[int, Mapping[str, float]]], rule: EarlyStopping) -> str | None:
    """Return the reason to end a run, given the results of its evaluated rounds in order; None: the run continues."""
    if rule.monitor is None:
        return None
    best, best_round, since = float("-inf"), 0, 0
    for round, results in evaluations:
        if problem := monitor_problem(rule, results):
            raise InputError(problem)
        value = results[rule.monitor]
        if rule.threshold is not None and value >= rule.threshold:
            return f"{rule.monitor} reached {rule.threshold:g} in round {round}"
        if value > best + rule.min_delta:
            best, best_round, since = value, round, 0
        else:
            since += 1
        if since == rule.patience:
            by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
            return (
                f"{rule.monitor} did not improve{by} in {since} evaluation{'s' * (since > 1)} after round {best_round}"
            )
    return None


def monitor_problem(rule: EarlyStopping, names: Collection[str]) -> Problem:
    """Return the sentence of a rule whose result is not part of the evaluation."""
    if rule.monitor is None or rule.monitor in names:
        return None
    available = f"has {', '.join(names)}; choose one of these, or" if names else "has none; choose"
    return f"early_stopping.monitor={rule.monitor} is not a result of evaluation, which {available} another evaluation"


def threshold_problem(rule: EarlyStopping, unit: str) -> Problem:
    """Return the sentence of thresholds that a result of this unit cannot reach."""
    for name, value in (("threshold", rule.threshold), ("min_delta", rule.min_delta)):
        if unit == ACCURACY and value is not None and value > 1:
            return (
                f"early_stopping.{name}={value:g} but {rule.monitor} is in [0, 1]; for {value:g}% set "
                f"early_stopping.{name}={value / 100:g}"
            )
    return None
