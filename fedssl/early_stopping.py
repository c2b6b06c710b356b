"""When a run ends before its last round: a rule over the results of its evaluations.

The rule has no memory of its own: it is a function of the results on record, so that a resumed run ends where the
uninterrupted one does.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """By which results a run ends early.

    Attributes
    ----------
    monitor : str or None
        Name of a result of ``evaluation``, of which more is better; None: all rounds run.
    patience : int or None
        How many evaluations in a row may pass without an improvement, at least 1; None: any number.
    min_delta : float
        What the result must exceed the best one so far by, to count as an improvement; 0 or more, in the unit of the
        result (an accuracy is a share in [0, 1]).
    threshold : float or None
        The result that is enough; None: none is.

    Raises
    ------
    InputError
        One of them is not such a value, or they do not fit each other.
    """

    monitor: str | None = None
    patience: int | None = None
    min_delta: float = 0.0
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.monitor is not None and not isinstance(self.monitor, str):
            raise InputError(f"early_stopping.monitor={self.monitor} must be the name of a result, e.g. knn, or null")
        if self.patience is not None and (type(self.patience) is not int or self.patience < 1):
            raise InputError(f"early_stopping.patience={self.patience} must be a whole number of at least 1, or null")
        if not self.min_delta >= 0:
            raise InputError(f"early_stopping.min_delta={self.min_delta} must be 0 or more")
        if self.threshold is not None and type(self.threshold) not in (int, float):
            raise InputError(f"early_stopping.threshold={self.threshold} must be a number, e.g. 0.5 for 50%, or null")
        said = self.patience is not None or self.threshold is not None
        if self.monitor is None and said:
            raise InputError(
                "early_stopping has no monitor; name the result that decides, e.g. early_stopping.monitor=knn, or leave "
                "early_stopping.patience and early_stopping.threshold null"
            )
        if self.monitor is not None and not said:
            raise InputError(
                f"early_stopping.monitor={self.monitor} says no more; add early_stopping.patience=3 or early_stopping.threshold=0.5"
            )


def stop_reason(evaluations: Iterable[tuple[int, Mapping[str, float]]], rule: EarlyStopping) -> str | None:
    """Say why a run is to end; None: it goes on.

    Parameters
    ----------
    evaluations : iterable of (int, mapping)
        Rounds, in order, with their results by name.

    Raises
    ------
    InputError
        An evaluation has no such result.
    """
    if rule.monitor is None:
        return None
    best, best_round, since = float("-inf"), 0, 0
    for round, results in evaluations:
        check_monitor(rule, results)
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


def check_monitor(rule: EarlyStopping, names: Collection[str]) -> None:
    """Refuse, by an `InputError`, a rule over a result that no evaluation has."""
    if rule.monitor is not None and rule.monitor not in names:
        given = f"gives {', '.join(names)}; choose one of these, or" if names else "gives none; choose"
        raise InputError(
            f"early_stopping.monitor={rule.monitor} is no result of evaluation, which {given} another evaluation"
        )


def check_threshold_unit(rule: EarlyStopping, unit: str) -> None:
    """Refuse, by an `InputError`, a rule that asks for more than a result of this unit can be."""
    for name, value in (("threshold", rule.threshold), ("min_delta", rule.min_delta)):
        if unit == ACCURACY and value is not None and value > 1:
            raise InputError(
                f"early_stopping.{name}={value:g} but {rule.monitor} is a share in [0, 1]; for {value:g}% set "
                f"early_stopping.{name}={value / 100:g}"
            )
