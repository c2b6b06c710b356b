"""Which result leads by more than the seeds make results vary."""

from collections.abc import Hashable, Sequence
from statistics import mean, stdev

# Settings, and groups of them, that say what is to be learned and how it is spread: across these nothing is best.
COMPARISON_KEYS = ("dataset", "partition", "num_clients", "newcomers", "experiment")
MARK_CAPTION = (
    "the best accuracy of all rows with the same data and clients, where its mean leads the second best by more than "
    "the larger of their standard deviations over seeds; with one seed of either nothing is marked"
)


def comparison_key(settings: dict[str, str]) -> Hashable:
    """What rows must agree in so that one can be better than another."""
    return frozenset((key, value) for key, value in settings.items() if key.partition(".")[0] in COMPARISON_KEYS)


def best_rows(values: Sequence[Sequence[float]], tasks: Sequence[Hashable]) -> set[int]:
    """Positions of the rows that are best among those of their task, as `MARK_CAPTION` has it.

    Parameters
    ----------
    values : sequence of sequence of float
        The accuracies of every row, one for each seed; a row without any is passed over.
    tasks : sequence of hashable
        One for each row.
    """
    found = set()
    for task in set(tasks):
        rows = [row for row in range(len(tasks)) if tasks[row] == task and values[row]]
        rows.sort(key=lambda row: mean(values[row]), reverse=True)
        first, second = (values[row] for row in rows[:2]) if len(rows) > 1 else ([], [])
        if min(len(first), len(second)) > 1 and mean(first) - mean(second) > max(stdev(first), stdev(second)):
            found.add(rows[0])
    return found
