"""Group runs that differ only in their seed, and find the settings in which runs differ."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from fedssl.config.compose import RESUMABLE_KEYS
from fedssl.config.statistics_settings import FEDERATED
from fedssl.plain_values import flatten
from fedssl.runs.run import Run

MAIN = ("strategy", "method", "encoder", "partition", "partition.alpha", "num_clients", "rounds")
OWN_KEYS = {"output_dir", "resume", "run_id", "pause_after"}  # of one start of a run
# Settings and config groups in which runs of one group may differ, because they change no result. The others in
# `RESUMABLE_KEYS` do.
IGNORED = {"seed", *OWN_KEYS, *RESUMABLE_KEYS} - {"rounds", "early_stopping", "aggregation.round_deadline"}


@dataclass(frozen=True)
class RunGroup:
    """Runs, at least one, with the same values of the compared settings."""

    settings: dict[str, str]
    runs: list[Run]

    @property
    def strategy(self) -> str:
        return self.runs[0].value("strategy")

    @property
    def label(self) -> str:
        """Return the legend label: the strategy and the other settings."""
        others = [f"{key}={value}" for key, value in self.settings.items() if key != "strategy" and value]
        return ", ".join([self.strategy, *others])


def group_runs(runs: Iterable[Run], settings_of: Callable[[Run], dict[str, str]]) -> list[RunGroup]:
    """Group the runs for which ``settings_of`` returns the same, in the order of their first runs."""
    groups: dict[frozenset[tuple[str, str]], RunGroup] = {}
    for run in runs:
        settings = settings_of(run)
        groups.setdefault(frozenset(settings.items()), RunGroup(settings, [])).runs.append(run)
    return list(groups.values())


def group_by_seed(runs: Sequence[Run]) -> list[RunGroup]:
    """Group runs that differ only in their seed, one run per seed; ``settings`` are those in which groups differ."""
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
    """Return a function that maps a run to the settings by which it is compared with these runs.

    These are ``always`` and all settings that an override of any run sets. A default value equals the same value set by
    an override.
    """
    given = (key for run in runs for key in run.overrides if not is_ignored(key, ignored))
    keys = list(dict.fromkeys([*always, *given]))
    return lambda run: {key: FEDERATED if key in run.measured_keys else run.value(key) for key in keys}


def all_compared_settings(run: Run) -> dict[str, str]:
    """Return all settings of a run that may change a result; its folder if the settings are unknown."""
    if not run.settings:
        return {"": str(run.folder)}
    ignored = {*IGNORED, *run.measured_keys}
    return {key: repr(value) for key, value in flatten(run.settings) if not is_ignored(key, ignored)}


def is_ignored(key: str, ignored: Set[str] = IGNORED) -> bool:
    """Return whether a setting or its config group is not compared."""
    return not ignored.isdisjoint({key, key.partition(".")[0]})


def varying(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ; a missing value is empty."""
    keys = dict.fromkeys(itertools.chain.from_iterable(settings))
    return [key for key in keys if len({values.get(key, "") for values in settings}) > 1]


def same_value(one: str, other: str) -> bool:
    """Return whether two texts are the same value: 0.10 is 0.1, and True is true."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one.lower() == other.lower()
