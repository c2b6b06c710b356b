"""Results of evaluations: numbers with units.

Files store a result as a plain number under its name, and its standard deviation under the name with suffix ``_std``,
unless a result has that name, such as one on a domain ``std``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev

from fedssl.text_table import align

ACCURACY = "accuracy"  # unit of a share of correct predictions in [0, 1], displayed in percent
FRACTION = "fraction"  # unit of other scores in [0, 1] of which more is better, displayed in percent
ERROR = "error"  # unit of results of which less is better, in the unit of their targets
IN_PERCENT = (ACCURACY, FRACTION)
# A representation below any of these has collapsed. Trained encoders are above 0.2, 5 and 2.5.
COLLAPSE_THRESHOLDS = {"effective_rank": 1.5, "covariance_rank": 2.0, "spread": 0.05}

_STD_SUFFIX = "_std"


@dataclass(frozen=True)
class Score:
    """Result of an evaluation."""

    value: float
    unit: str = ACCURACY  # or the displayed one, empty if there is none
    std: float | None = None  # over draws or models; None for one draw or model
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)  # such as those of classes, by their names
    # Test images that count; None if it is unknown, or not the same for all models. Results are equal by their values.
    num_images: int | None = field(default=None, compare=False)

    @classmethod
    def over_draws(cls, values: Sequence[float], unit: str = ACCURACY) -> "Score":
        """Return the score of several draws or models, see `mean_and_std`."""
        average, std = mean_and_std(values)
        return cls(average, unit, std)

    @classmethod
    def over_parts(cls, parts: Mapping[str, float], unit: str, *, num_images: int | None = None) -> "Score":
        """Return the mean of parts, without a deviation."""
        return cls(mean(parts.values()), unit, parts=parts if len(parts) > 1 else {}, num_images=num_images)

    @classmethod
    def over_runs(cls, scores: Sequence["Score"]) -> "Score":
        """Return the score over runs; that of one run is unchanged, with its deviation over draws."""
        if len(scores) == 1:
            return scores[0]
        over_draws = cls.over_draws([score.value for score in scores], scores[0].unit)
        return replace(over_draws, num_images=_common(score.num_images for score in scores))

    @property
    def goodness(self) -> float:
        """Return a number that is larger for better results."""
        return -self.value if self.unit == ERROR else self.value

    @property
    def shown(self) -> float:
        """Displayed value, in percent for the units `IN_PERCENT`."""
        return 100 * self.value if self.unit in IN_PERCENT else self.value

    @property
    def number(self) -> str:
        """Display text without the unit."""
        numbers = [self.value] if self.std is None else [self.value, self.std]
        return " ± ".join(f"{100 * number:.1f}" if self.unit in IN_PERCENT else f"{number:.4g}" for number in numbers)

    @property
    def text(self) -> str:
        """Display text with the unit."""
        return f"{self.number}%" if self.unit in IN_PERCENT else f"{self.number} {self.unit}".rstrip()


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (divisor n - 1) as in all tables and figures; None for one value."""
    return mean(values), stdev(values) if len(values) > 1 else None


def column_title(name: str, unit: str) -> str:
    """Return the title of a table column, with the unit of its numbers."""
    return f"{name} ({'%' if unit in IN_PERCENT else unit})" if unit else name


def as_scores(results: Mapping[str, Score | float], units: Mapping[str, str] | None = None) -> dict[str, Score]:
    """Convert the results of a protocol or a file to scores.

    The standard deviation of a plain number is under its name with suffix ``_std``. ``units`` are those of plain
    numbers, by name; numbers without a unit are accuracies, and a number with one is no deviation.
    """
    units = units or {}
    numbers = {name: result for name, result in results.items() if not isinstance(result, Score)}
    std_names = {name + _STD_SUFFIX for name in numbers}
    deviations = {name: number for name, number in numbers.items() if name in std_names and name not in units}
    scores = {}
    for name, result in results.items():
        if isinstance(result, Score):
            std = None if result.std is None else float(result.std)
            scores[name] = replace(result, value=float(result.value), std=std)  # of a tensor or of NumPy
        elif name not in deviations:
            scores[name] = Score(float(result), units.get(name, ACCURACY), deviations.get(name + _STD_SUFFIX))
    return scores


def mean_over_models(results: Sequence[Mapping[str, Score]]) -> dict[str, Score]:
    """Average results over the models that have them, with standard deviations; those of one model are unchanged."""
    names = dict.fromkeys(name for result in results for name in result)
    return {name: Score.over_runs([result[name] for result in results if name in result]) for name in names}


def to_flat_dict(scores: Mapping[str, Score]) -> dict[str, float]:
    """Convert scores to the plain numbers of a file, values and standard deviations."""
    numbers = {}
    for name, score in scores.items():
        numbers[name] = score.value
        if score.std is not None and name + _STD_SUFFIX not in scores:
            numbers[name + _STD_SUFFIX] = score.std
    return numbers


def units_of(scores: Mapping[str, Score]) -> dict[str, str]:
    """Return the unit of every score."""
    return {name: score.unit for name, score in scores.items()}


def num_test_images(results: Iterable[Mapping[str, Score]]) -> dict[str, int]:
    """Return the number of test images of every result for which it is known, and the same in all ``results``."""
    counts: dict[str, list[int | None]] = {}
    for scores in results:
        for name, score in scores.items():
            counts.setdefault(name, []).append(score.num_images)
    return {name: number for name, each in counts.items() if (number := _common(each)) is not None}


def _common(values: Iterable[int | None]) -> int | None:
    """Return the value that all have; None if there are several."""
    distinct = {*values}
    return distinct.pop() if len(distinct) == 1 else None


def format_table(results: Mapping[str, Mapping[str, Score]]) -> str:
    """Format scores as a text table: a column for each key of ``results``, a row for each protocol with its unit.

    The last column has the numbers of test images, if any is known.
    """
    units = {name: unit for column in results.values() for name, unit in units_of(column).items()}
    if not units:
        return "nothing was evaluated: no result is finite, or there is no protocol"
    images = num_test_images(results.values())
    body = [
        [
            name if unit == ACCURACY else column_title(name, unit),
            *(column[name].number if name in column else "-" for column in results.values()),
            *([str(images.get(name, "-"))] if images else []),
        ]
        for name, unit in units.items()
    ]
    titles = [*results, *(["test images"] if images else [])]
    return align([["accuracy in %" if ACCURACY in units.values() else "", *titles], *body], left=1)
