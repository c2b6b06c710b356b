"""When a run ends before its last round: a rule over the results of its evaluations.

The rule has no memory of its own: it is a function of the results on record, so that a resumed run ends where the
uninterrupted one does.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY


@dataclass(frozen=True, kw_only=True)
class StopSettings:
    """By which results a run ends early.

    Attributes
    ----------
    metric : str or None
        Name of a result of ``evaluation``, of which more is better; None: all rounds run.
    patience : int or None
        How many evaluations in a row may pass without an improvement, at least 1; None: any number.
    least : float
        What the result must exceed the best one so far by, to count as an improvement; 0 or more, in the unit of the
        result (an accuracy is a share in [0, 1]).
    reach : float or None
        The result that is enough; None: none is.

    Raises
    ------
    InputError
        One of them is not such a value, or they do not fit each other.
    """

    metric: str | None = None
    patience: int | None = None
    least: float = 0.0
    reach: float | None = None

    def __post_init__(self) -> None:
        if self.metric is not None and not isinstance(self.metric, str):
            raise InputError(f"stop_when.metric={self.metric} must be the name of a result, e.g. knn, or null")
        if self.patience is not None and (type(self.patience) is not int or self.patience < 1):
            raise InputError(f"stop_when.patience={self.patience} must be a whole number of at least 1, or null")
        if not self.least >= 0:
            raise InputError(f"stop_when.least={self.least} must be 0 or more")
        if self.reach is not None and type(self.reach) not in (int, float):
            raise InputError(f"stop_when.reach={self.reach} must be a number, e.g. 0.5 for 50%, or null")
        said = self.patience is not None or self.reach is not None
        if self.metric is None and said:
            raise InputError(
                "stop_when has no metric; name the result that decides, e.g. stop_when.metric=knn, or leave "
                "stop_when.patience and stop_when.reach null"
            )
        if self.metric is not None and not said:
            raise InputError(
                f"stop_when.metric={self.metric} says no more; add stop_when.patience=3 or stop_when.reach=0.5"
            )


def reason_to_stop(evaluations: Iterable[tuple[int, Mapping[str, float]]], rule: StopSettings) -> str | None:
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
    if rule.metric is None:
        return None
    best, best_round, since = float("-inf"), 0, 0
    for round, results in evaluations:
        check_metric(rule, results)
        value = results[rule.metric]
        if rule.reach is not None and value >= rule.reach:
            return f"{rule.metric} reached {rule.reach:g} in round {round}"
        if value > best + rule.least:
            best, best_round, since = value, round, 0
        else:
            since += 1
        if since == rule.patience:
            by = f" by more than {rule.least:g}" if rule.least else ""
            return (
                f"{rule.metric} did not improve{by} in {since} evaluation{'s' * (since > 1)} after round {best_round}"
            )
    return None


def check_metric(rule: StopSettings, names: Collection[str]) -> None:
    """Refuse, by an `InputError`, a rule over a result that no evaluation has."""
    if rule.metric is not None and rule.metric not in names:
        given = f"gives {', '.join(names)}; choose one of these, or" if names else "gives none; choose"
        raise InputError(f"stop_when.metric={rule.metric} is no result of evaluation, which {given} another evaluation")


def check_size(rule: StopSettings, unit: str) -> None:
    """Refuse, by an `InputError`, a rule that asks for more than a result of this unit can be."""
    for name, value in (("reach", rule.reach), ("least", rule.least)):
        if unit == ACCURACY and value is not None and value > 1:
            raise InputError(
                f"stop_when.{name}={value:g} but {rule.metric} is a share in [0, 1]; for {value:g}% set "
                f"stop_when.{name}={value / 100:g}"
            )
