"""Results of evaluations: numbers that know their unit.

Files hold a result as a plain number under its name, and its standard deviation under the name with ``_std`` behind it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

ACCURACY = "accuracy"  # the unit of a share of right predictions, in [0, 1]; people are shown it in per cent

_STD_SUFFIX = "_std"


@dataclass(frozen=True)
class Score:
    """A result.

    Attributes
    ----------
    value : float
    unit : str
        `ACCURACY`, or the word that people are to read behind the number; empty if there is none.
    std : float or None
        Standard deviation over draws or models; None: there was only one.
    """

    value: float
    unit: str = ACCURACY
    std: float | None = None

    @property
    def number(self) -> str:
        """For people, where the unit stands elsewhere."""
        shown = [self.value] if self.std is None else [self.value, self.std]
        return " ± ".join(f"{100 * one:.1f}" if self.unit == ACCURACY else f"{one:.4g}" for one in shown)

    @property
    def text(self) -> str:
        """For people, with the unit."""
        return f"{self.number}%" if self.unit == ACCURACY else f"{self.number} {self.unit}".rstrip()


def column_title(name: str, unit: str) -> str:
    """Name a column of a table with the unit of its numbers."""
    return f"{name} ({'%' if unit == ACCURACY else unit})" if unit else name


def as_scores(results: Mapping[str, Score | float], units: Mapping[str, str] | None = None) -> dict[str, Score]:
    """Bring what a protocol returns, or a file holds, into the one form.

    Parameters
    ----------
    results : mapping
        Name to result. A plain number takes its spread from the number under its name with ``_std`` behind it.
    units : mapping or None
        Name to unit of plain numbers; those that are not in it are accuracies.
    """
    units = units or {}
    numbers = {name: result for name, result in results.items() if not isinstance(result, Score)}
    spreads = {name + _STD_SUFFIX for name in numbers} & numbers.keys()
    scores = {}
    for name, result in results.items():
        if isinstance(result, Score):
            scores[name] = result
        elif name not in spreads:
            scores[name] = Score(float(result), units.get(name, ACCURACY), numbers.get(name + _STD_SUFFIX))
    return scores


def mean_over_models(results: Sequence[Mapping[str, Score]]) -> dict[str, Score]:
    """Return the results of one model as they are; of several the means, and the spread over the models."""
    if len(results) == 1:
        return dict(results[0])
    averaged = {}
    for name, first in results[0].items():
        values = [result[name].value for result in results]
        averaged[name] = Score(mean(values), first.unit, stdev(values))
    return averaged


def to_flat_dict(scores: Mapping[str, Score]) -> dict[str, float]:
    """Bring scores into the form of files: a plain number for every value, and one for every spread."""
    numbers = {}
    for name, score in scores.items():
        numbers[name] = score.value
        if score.std is not None:
            numbers[name + _STD_SUFFIX] = score.std
    return numbers


def units_of(scores: Mapping[str, Score]) -> dict[str, str]:
    """Return the unit of every score, which files hold beside the numbers."""
    return {name: score.unit for name, score in scores.items()}
