"""Group runs that differ only in their seed, and find the settings in which runs differ."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import mean, stdev

from fedssl.config.compose import RESUMABLE_KEYS
from fedssl.evaluation.scores import ACCURACY, Score
from fedssl.runs.run import Run, iter_settings

MAIN = ("strategy", "method", "encoder", "partition", "partition.alpha", "num_clients", "rounds")
OWN_KEYS = {"output_dir", "resume", "run_id"}  # of every run another value
# Settings, and groups of them, in which runs of one group may differ: they change no final number.
IGNORED = {"seed", *OWN_KEYS, *RESUMABLE_KEYS} - {"rounds", "early_stopping"}


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same settings.

    Attributes
    ----------
    settings : dict
        Key to value, as on the command line: the settings by which runs were compared.
    runs : list of Run
        At least one, in the order in which they were found.
    """

    settings: dict[str, str]
    runs: list[Run]

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return self.runs[0].value("strategy")

    @property
    def label(self) -> str:
        """For a legend: the strategy, and its settings."""
        others = [f"{key}={value}" for key, value in self.settings.items() if key != "strategy" and value]
        return ", ".join([self.strategy, *others])


def group_runs(runs: Iterable[Run], settings_of: Callable[[Run], dict[str, str]]) -> list[RunGroup]:
    """Group the runs for which ``settings_of`` returns the same, in the order in which groups were found."""
    groups: dict[frozenset[tuple[str, str]], RunGroup] = {}
    for run in runs:
        settings = settings_of(run)
        groups.setdefault(frozenset(settings.items()), RunGroup(settings, [])).runs.append(run)
    return list(groups.values())


def group_by_seed(runs: Sequence[Run]) -> list[RunGroup]:
    """Group runs that differ only in their seed, one for each seed; ``settings`` are those in which groups differ."""
    groups = group_runs(runs, compared_settings(runs, always=MAIN))
    keys = varying([group.settings for group in groups])
    return [RunGroup({key: group.settings[key] for key in keys}, first_of_each_seed(group.runs)) for group in groups]


def first_of_each_seed(runs: Iterable[Run]) -> list[Run]:
    """Keep the first run of each seed: another one repeats it."""
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(run.seed, run)
    return list(first.values())


def compared_settings(
    runs: Iterable[Run], *, always: Iterable[str] = (), ignored: Set[str] = IGNORED
) -> Callable[[Run], dict[str, str]]:
    """Make a function that returns the settings of a run by which it is compared with these runs.

    Compared are ``always`` and all settings that one of the runs was given on the command line, by their values: it
    does not matter whether a run was given a value or has it by default.
    """
    given = (key for run in runs for key in run.overrides if not is_ignored(key, ignored))
    keys = list(dict.fromkeys([*always, *given]))
    return lambda run: {key: run.value(key) for key in keys}


def all_compared_settings(run: Run) -> dict[str, str]:
    """Return all settings of a run that may change a result; for a run whose settings are unknown its folder."""
    if not run.settings:
        return {"": str(run.folder)}
    return {key: repr(value) for key, value in iter_settings(run.settings) if not is_ignored(key)}


def is_ignored(key: str, ignored: Set[str] = IGNORED) -> bool:
    """Whether a setting, or its group, is one of those that are not compared."""
    return not ignored.isdisjoint({key, key.partition(".")[0]})


def varying(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ, in the order in which they are found; a missing value is empty."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({one.get(key, "") for one in settings}) > 1]


def score_over_seeds(values: Sequence[float], unit: str = ACCURACY) -> Score:
    """Mean, and standard deviation (divisor n - 1) where there is more than one value."""
    return Score(mean(values), unit, stdev(values) if len(values) > 1 else None)


def same_value(one: str, other: str) -> bool:
    """Whether two texts are the same value: 0.10 is 0.1, and True is true."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one.lower() == other.lower()
