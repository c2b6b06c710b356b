"""Group runs that differ only in their seed, and find the settings in which runs differ."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedssl.config.compose import RESULT_KEYS, RESUMABLE_KEYS
from fedssl.config.statistics_settings import FEDERATED
from fedssl.errors import sanitize
from fedssl.logs import log_once
from fedssl.plain_values import flatten, whole_numbers
from fedssl.runs.run import Run
from fedssl.runs.same_images import IMAGES_KEY, images_by_run

MAIN = ("strategy", "method", "encoder", "partition", "partition.alpha", "num_clients", "rounds")
OWN_KEYS = {"output_dir", "resume", "run_id", "pause_after"}  # of one start of a run
# Settings and config groups in which runs of one group may differ, because they change no result.
IGNORED = {"seed", *OWN_KEYS, *RESUMABLE_KEYS} - RESULT_KEYS
_INTERVAL = "evaluate_every"  # compared for runs that may stop early


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
    """Group runs that differ only in their seed, one run per seed; ``settings`` are those in which groups differ.

    Of a group with a finished run, all others are left out.
    """
    groups = group_runs(runs, compared_settings(runs, always=MAIN))
    keys = varying([group.settings for group in groups])
    return [
        RunGroup(
            {key: group.settings[key] for key in keys},
            newest_of_each_seed([run for run in group.runs if run.finished] or group.runs),
        )
        for group in groups
    ]


def newest_of_each_seed(runs: Iterable[Run]) -> list[Run]:
    """Keep the newest run of each seed; log a warning if others have other results."""
    of_seed: dict[str, list[Run]] = {}
    for run in runs:
        of_seed.setdefault(run.seed, []).append(run)
    newest = [max(same, key=lambda run: run.date) for same in of_seed.values()]
    for used in newest:
        for run in of_seed[used.seed]:
            if differing := differing_results(run, used):
                log_once(
                    logging.WARNING,
                    f"{run.folder} and {used.folder} have the same settings and seed but other results ({differing}), "
                    f"a sign of other code, another machine or other threads; {used.folder}, the newest, is used",
                )
    return newest


def differing_results(run: Run, other: Run) -> str:
    """Return the values of both runs of the first result in which they differ; empty if there is none."""
    for name, score in run.results.items():
        theirs = other.results.get(name, score)
        if score.value != theirs.value:
            return f"{sanitize(name)} {score.shown:.6g} and {theirs.shown:.6g}"
    return ""


def compared_settings(
    runs: Sequence[Run], *, always: Iterable[str] = (), ignored: Set[str] = IGNORED
) -> Callable[[Run], dict[str, str]]:
    """Return a function that maps a run to the settings by which it is compared with these runs.

    These are ``always``, all settings that an override of any run sets, and those in which runs with the same of these
    differ: their files of settings differ. A default value equals the same value set by an override, 1.0 equals 1, and
    a path of images any other one of the same images.
    """
    images = images_by_run(runs, _without_images)

    def settings_of(run: Run, keys: Iterable[str]) -> dict[str, str]:
        values = {key: _compared_value(run, key) for key in keys}
        return values | _named(images, run, values)

    given = (key for run in runs for key in run.overrides if not is_ignored(key, ignored))
    keys = dict.fromkeys([*always, *given])
    groups = group_runs(runs, lambda run: settings_of(run, keys))
    for group in groups:
        settings = [_all_settings(run, ignored, images) for run in group.runs if run.settings]
        keys |= dict.fromkeys(key for key in varying(settings) if all(key in values for values in settings))
    return lambda run: settings_of(run, keys)


def _named(images: Mapping[Path, str], run: Run, values: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the images in place of their path, if the values have one."""
    return {IMAGES_KEY: images[run.folder]} if IMAGES_KEY in values and run.folder in images else {}


def _without_images(run: Run) -> frozenset[tuple[str, str]]:
    """Return all settings that may change a result but the path of the images; the overrides if they are unknown."""
    overrides = {key: value for key, value in run.overrides.items() if not is_ignored(key)}
    values = _all_settings(run, IGNORED, {}) if run.settings else overrides
    return frozenset((key, value) for key, value in values.items() if key != IMAGES_KEY)


def _compared_value(run: Run, key: str) -> str:
    """Return a setting of the run; empty for ``evaluate_every`` unless it decides when the run may end."""
    if key == _INTERVAL and run.value("early_stopping.monitor") in ("", "null"):
        return ""
    return FEDERATED if key in run.measured_keys else run.value(key)


def _all_settings(run: Run, ignored: Set[str], images: Mapping[Path, str]) -> dict[str, str]:
    ignored = {*ignored, *run.measured_keys}
    settings = flatten(run.settings or {})
    values = {key: repr(whole_numbers(value)) for key, value in settings if not is_ignored(key, ignored)}
    return values | {_INTERVAL: _compared_value(run, _INTERVAL)} | _named(images, run, values)


def is_ignored(key: str, ignored: Set[str] = IGNORED) -> bool:
    """Return whether a setting or a node that has it, such as its config group, is not compared."""
    return not ignored.isdisjoint(itertools.accumulate(key.split("."), "{}.{}".format))


def evaluates_alike(run: Run) -> bool:
    """Return whether every protocol of the rounds is one of the end: their results of one name are comparable."""
    settings = run.settings or {}
    in_rounds, at_the_end = (list(_protocols(settings.get(key))) for key in ("evaluation", "final_evaluation"))
    return all(protocol in at_the_end for protocol in in_rounds)


def _protocols(node: Any) -> Iterator[Any]:
    """Yield the settings of a protocol, or of each one that it combines."""
    combined = node.get("protocols") if isinstance(node, Mapping) else None
    if isinstance(combined, Mapping):
        for inner in combined.values():
            yield from _protocols(inner)
    else:
        yield node


def varying(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ; a missing value is empty."""
    keys = dict.fromkeys(itertools.chain.from_iterable(settings))
    return [key for key in keys if len({values.get(key, "") for values in settings}) > 1]


def same_value(one: str, other: str) -> bool:
    """Return whether two texts are the same value: 0.10 is 0.1, True is true, and [1, 2] is [1,2]."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one.lower().replace(", ", ",") == other.lower().replace(", ", ",")
