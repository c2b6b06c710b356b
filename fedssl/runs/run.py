"""Run folders as they lie on the disk: which there are, what their settings are called, and how they ended."""

import fcntl
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from fedssl.config.overrides import config_groups
from fedssl.config.renamed import update, update_choices
from fedssl.config.saved_run import is_of_earlier_version, read_overrides, update_overrides
from fedssl.errors import InputError
from fedssl.evaluation.scores import Score, as_scores
from fedssl.runs.jsonl import finite_number, mapping_of, optional, read_jsonl, text
from fedssl.untrusted import open_regular_file, read_text, read_yaml, sanitize

# Any of these makes a folder that of a run: one that was refused has the first only, one that was killed the others.
RUN_MARKERS = ("summary.json", "config.yaml", "run.log")
LOCK_FILE = ".lock"  # held by the process of a run, or of a sweep, as long as it goes on


@dataclass(frozen=True)
class Run:
    """A run, finished or not.

    Attributes
    ----------
    folder : Path
    words : dict
        Key to value, of the command line that gave the settings.
    command_overrides : tuple of str
        The same words as they were typed, with which the run can be repeated.
    choices : dict
        The choice in every group of the configuration, by whatever it was made; of a folder without ``choices.yaml``
        only those among the words.
    settings : dict or None
        All settings, as plain values; None if it ended before they were found usable.
    summary : dict or None
        How it ended; None if it goes on, or was ended from outside.
    running : bool
        Whether a process of this host, or of one that shares its disk, is at work on it.
    """

    folder: Path
    overrides: dict[str, str]
    command_overrides: tuple[str, ...]
    choices: dict[str, str]
    settings: dict[str, Any] | None
    summary: dict[str, Any] | None
    running: bool

    @property
    def finished(self) -> bool:
        """Whether all rounds ran and the results are there."""
        return self.summary is not None and self.summary["status"] == "finished"

    @property
    def results(self) -> dict[str, Score]:
        """What the federated encoder is worth, by protocol; none without a finished evaluation."""
        return self.results_of("federated")

    def results_of(self, encoder_kind: str) -> dict[str, Score]:
        """What ``encoder_kind`` is worth: the ``"federated"`` encoder, the ``"untrained"`` one or raw ``"pixels"``."""
        if self.summary is None or not self.finished:
            return {}
        return as_scores(self.summary["final"].get(encoder_kind, {}), self.summary.get("units"))

    @property
    def failure_reason(self) -> str:
        """Why there are no results, in one line."""
        if self.running:
            return f"{self.progress} done"
        if self.summary is None:
            return "no readable summary.json: it was ended from outside, unless it runs on another machine"
        return " ".join(sanitize(self.summary["reason"] or self.summary["status"]).split())

    @property
    def state(self) -> str:
        """In one or two words: ``running``, how it ended, or that nobody knows."""
        if self.running:
            return "running"
        return "ended from outside" if self.summary is None else sanitize(self.summary["status"])

    @cached_property
    def rounds_done(self) -> int:
        """The rounds of a finished run, else the last one that it has written a line of; 0: none yet."""
        said = self.summary.get("rounds") if self.summary and self.finished else None
        if isinstance(said, int):
            return said
        lines = read_jsonl(self.folder / "metrics.jsonl")
        return lines[-1]["round"] if lines else 0

    @property
    def progress(self) -> str:
        """How many rounds are done, and of how many, if its settings tell."""
        total = self.value("rounds")
        return f"{self.rounds_done} of {total} rounds" if total else f"{self.rounds_done} rounds"

    @property
    def ended_early(self) -> bool:
        """Return whether ``early_stopping`` ended the run before its last round."""
        return self.summary is not None and self.finished and bool(self.summary["reason"])

    @property
    def command(self) -> str:
        """The command that repeats it, for a shell."""
        return shlex.join(["fedssl", *map(sanitize, self.command_overrides)])

    @property
    def all_settings(self) -> dict[str, str]:
        """All settings by dotted keys, and the choices by their names; of a run without settings the words alone."""
        return {**self.overrides, **flatten_settings(self.settings or {}), **self.choices}

    @property
    def seed(self) -> str:
        """The seed, which is 0 where nothing says another."""
        return self.value("seed") or "0"

    def value(self, key: str) -> str:
        """Tell a setting as on the command line, a choice by its name; empty where the run has no such setting."""
        if key in self.choices:
            return self.choices[key]
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return self.overrides.get(key, "") if value is None or isinstance(value, dict) else sanitize(value)


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Find the runs that the folders are, or that lie below them, each once.

    Raises
    ------
    InputError
        A folder does not exist, there is no run in it, or a run's files are damaged.
    """
    found: dict[Path, Run] = {}
    for folder in folders:
        runs = run_folders(folder)
        if not runs:
            problem = "there is no run in" if folder.is_dir() else "there is no folder"
            raise InputError(f"{problem} {folder}; give the folders of runs or of sweeps, e.g. runs/* or multirun/*")
        found |= {run.resolve(): read_run(run) for run in runs if run.resolve() not in found}
    return list(found.values())


def read_run(folder: Path) -> Run:
    """Read what the files of a run folder tell; a summary that is missing or damaged counts as not written.

    Raises
    ------
    InputError
        Another file is damaged.
    """
    running = is_locked(folder)  # first: what let go of it before has written its summary
    summary, settings = read_summary(folder / "summary.json"), read_yaml(folder / "config.yaml", dict)
    overrides = summary["overrides"] if summary else read_overrides(folder / "overrides.yaml") or []
    command_overrides = tuple(
        override for override in overrides if override.partition("=")[0] not in ("output_dir", "resume")
    )
    own = {
        key.lstrip("+"): value
        for key, _, value in (sanitize(override).partition("=") for override in command_overrides)
    }
    choices = read_yaml(folder / "choices.yaml", dict)
    if is_of_earlier_version(folder):
        settings, choices = update(settings), update_choices(choices or {})
    choices = choices or {key: value for key, value in own.items() if key in config_groups()}
    names = {sanitize(group): sanitize(name) for group, name in choices.items()}
    return Run(folder, own, command_overrides, names, settings, summary, running)


def is_locked(folder: Path) -> bool:
    """Whether a process is at work on the run, or the sweep, of a folder."""
    try:
        with open_regular_file(folder / LOCK_FILE) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go of at the end of the block
    except BlockingIOError:
        return True
    except OSError:  # there is none, or it is of another kind
        return False
    return False


def acquire_lock(folder: Path) -> TextIO | None:
    """Tell others by a lock that a process is at work on the sweep of a folder, until it ends or closes the file.

    None: the folder cannot be written, or somebody else holds it.
    """
    try:
        lock = (folder / LOCK_FILE).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    return lock


def iter_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested settings; what looks like an interpolation stays as it stands."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from iter_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flatten_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Dotted keys and values of nested settings as text."""
    return {sanitize(key): sanitize(value) for key, value in iter_settings(settings)}


def strategy_of(folder: Path) -> str:
    """The name of the strategy of a run folder; empty if nothing tells it."""
    return read_run(folder).value("strategy")


def read_summary(file: Path) -> dict[str, Any] | None:
    """Read what a run writes at its end; None if it is missing, damaged or another program's."""
    try:
        summary = json.loads(read_text(file) or "")
    except (ValueError, RecursionError):
        return None
    if not (isinstance(summary, dict) and _is_summary(summary)):
        return None
    return summary | {"overrides": update_overrides(summary["overrides"], file.parent)}


def _is_summary(summary: dict[str, Any]) -> bool:
    needed = {"status": text, "reason": optional(text), "overrides": _is_text_list}
    if summary.get("status") == "finished":
        needed |= {"final": mapping_of(mapping_of(finite_number))}
    allowed = {"units": optional(mapping_of(text))}
    return needed.keys() <= summary.keys() and all(
        kind(summary[key]) for key, kind in (needed | allowed).items() if key in summary
    )


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(text, value))


def run_folders(folder: Path) -> list[Path]:
    """Run folders at or below ``folder``, in the order of their names; none within a run or a hidden folder."""
    found = []
    for place, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        if set(RUN_MARKERS) & set(files):
            inner.clear()
            found.append(Path(place))
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[Any]:
    """Sorts job 10 behind job 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]
