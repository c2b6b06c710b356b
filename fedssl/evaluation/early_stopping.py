"""Early stopping: a rule over the results of evaluations that ends a run before its last round.

The rule is a pure function of the recorded results, so that a resumed run ends in the same round as an uninterrupted
one.
"""

from collections.abc import Collection, Iterable, Mapping

from fedssl.config.settings import EarlyStopping
from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY
from fedssl.rules import Problem


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
