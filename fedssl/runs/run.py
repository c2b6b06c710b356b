"""Find and read run folders: settings, status and results."""

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedssl import locks
from fedssl.atomic_files import write_text
from fedssl.config.literal import plain_override, shell_command
from fedssl.config.overrides import config_groups
from fedssl.config.saved_run import read_overrides
from fedssl.config.statistics_settings import FEDERATED, measured_keys
from fedssl.digests import checksum
from fedssl.errors import InputError, sanitize
from fedssl.evaluation.scores import ACCURACY, Score, as_scores
from fedssl.logs import log_once
from fedssl.plain_values import as_text, flatten
from fedssl.runs.jsonl import finite_number, incomplete_files, mapping_of, missing_rounds, optional, read_jsonl, text
from fedssl.safe_io import corrupt_file_error, open_regular_file, read_text, read_yaml

# A run folder has any of these: a rejected run the first only, a killed run the others.
RUN_MARKERS = ("summary.json", "config.yaml", "run.log")
START_KEYS = ("output_dir", "resume", "pause_after")  # of one start of a run; they do not repeat it
PRUNED = "pruned"  # status of a job that its sweep does not continue
RANKME = "rankme"
# Results that need no labels, and their names among the collapse metrics of the last evaluated round.
LABEL_FREE = {RANKME: "effective_rank", "alpha_req": "alpha_req", "lidar": "lidar"}
FLEET_FILE = "fleet.json"  # reports of devices, nodes that train, are late or rejected, and the quality of the encoder
LOCK_FILE = ".lock"  # locked by the process of a run or a sweep
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)_(\d\d)-(\d\d)-(\d\d)")


@dataclass(frozen=True)
class Run:
    """A run in any status."""

    folder: Path
    overrides: dict[str, str]  # by key; of measured statistics their request
    command_overrides: tuple[str, ...]  # as they were typed, to repeat the run
    choices: dict[str, str]  # by config group; without ``choices.yaml`` only those among the overrides
    settings: dict[str, Any] | None  # as plain values; None if they were rejected
    summary: dict[str, Any] | None  # ``summary.json``; None for a run that is not over or was killed
    running: bool  # whether a process of this host, or of one that shares its disk, has locked the folder
    metrics: frozenset[str] | None = None  # names of the results that are read; None: all

    @property
    def finished(self) -> bool:
        return self.summary is not None and self.summary["status"] == "finished"

    @property
    def results(self) -> dict[str, Score]:
        """Return the results of the federated encoder by protocol; none if the run is not finished."""
        return self.results_of("federated")

    def results_of(self, encoder_kind: str) -> dict[str, Score]:
        """Return the results of the ``"federated"`` or the ``"untrained"`` encoder, or of raw ``"pixels"``."""
        if self.summary is None or not self.finished:
            return {}
        scores = as_scores(self.summary["final"].get(encoder_kind, {}), self.summary.get("units"))
        return {name: score for name, score in scores.items() if self.selects(name)}

    @cached_property
    def latest_results(self) -> dict[str, Score]:
        """Return the results of a finished run, else those of its last evaluation."""
        results = self.results
        if not self.finished:
            evaluated = [line for line in read_jsonl(self.folder / "metrics.jsonl") if "evaluation" in line]
            results = as_scores(evaluated[-1]["evaluation"], evaluated[-1].get("units")) if evaluated else {}
        return {sanitize(name): score for name, score in results.items()}

    @cached_property
    def date(self) -> str:
        """Return the start of the run, in the name of the folder or of the sweep's; else of the earliest file."""
        for name in (self.folder.name, self.folder.parent.name):
            if match := _DATE.search(name):
                return f"{match[1]} {match[2]}:{match[3]}:{match[4]}"
        files = [self.folder / mark for mark in RUN_MARKERS]
        earliest = min((file.stat().st_mtime for file in files if file.is_file()), default=0)
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(earliest))

    def selects(self, name: str) -> bool:
        """Return whether a result is one of `metrics`."""
        return self.metrics is None or name in self.metrics

    def metric(self, name: str) -> float | None:
        """Return the value of a final `score`; None if there is none."""
        score = self.score(name)
        return None if score is None else score.value

    def score(self, name: str, *, round: int | None = None) -> Score | None:
        """Return a final result or, with ``round``, that of the last evaluation until then; None if there is none.

        ``name`` is that of a protocol, or one of `LABEL_FREE`, of the global models' representations.
        """
        if name not in LABEL_FREE and round is None:
            return self.results.get(name)
        lines = read_jsonl(self.folder / "metrics.jsonl")
        values = [_result_in(line, name) for line in lines if round is None or line["round"] <= round]
        return next((value for value in reversed(values) if value is not None), None)

    @property
    def pruned(self) -> bool:
        """Return whether the sweep of the run does not continue it."""
        return self.summary is not None and self.summary["status"] == PRUNED and not self.running

    @property
    def failure_reason(self) -> str:
        """Return why there are no results, in one line."""
        if self.running:
            return f"{self.progress} done"
        if self.summary is None:
            return "no readable summary.json: it was ended from outside, unless it runs on another machine"
        return " ".join(sanitize(self.summary["reason"] or self.summary["status"]).split())

    @property
    def state(self) -> str:
        """Return the status in one or two words."""
        if self.running:
            return "running"
        return "ended from outside" if self.summary is None else sanitize(self.summary["status"])

    @cached_property
    def rounds_done(self) -> int:
        """Return the number of completed rounds."""
        rounds = self.summary.get("rounds") if self.summary and self.finished else None
        if isinstance(rounds, int):
            return rounds
        lines = read_jsonl(self.folder / "metrics.jsonl")
        return lines[-1]["round"] if lines else 0

    @property
    def progress(self) -> str:
        """Return the number of completed rounds, and of all if it is known."""
        total = self.value("rounds")
        return f"{self.rounds_done} of {total} rounds" if total else f"{self.rounds_done} rounds"

    @cached_property
    def incomplete_files(self) -> list[str]:
        """Return a line for each file that lacks lines of the run, e.g. because it was cut short."""
        return [] if self.running else incomplete_files(self.folder, rounds=self._recorded_rounds)

    @cached_property
    def missing_rounds(self) -> list[int]:
        """Return the completed rounds without a line in ``metrics.jsonl``."""
        return [] if self.running else missing_rounds(self.folder, rounds=self._recorded_rounds)

    @property
    def _recorded_rounds(self) -> int | None:
        rounds = (self.summary or {}).get("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def ended_early(self) -> bool:
        """Return whether ``early_stopping`` ended the run before its last round."""
        return self.summary is not None and self.finished and bool(self.summary["reason"])

    @property
    def command(self) -> str:
        """Return the shell command that repeats the run."""
        return shell_command(map(sanitize, self.command_overrides))

    @property
    def all_settings(self) -> dict[str, str]:
        """Return settings by dotted keys and choices by group; only the overrides if the settings are unknown."""
        return {**self.overrides, **flatten_settings(self.settings or {}), **self.choices}

    @property
    def seed(self) -> str:
        """Return the seed; the default is 0."""
        return self.value("seed") or "0"

    @property
    def measured_keys(self) -> Sequence[str]:
        """Return the settings that the run has measured, which may depend on its seed."""
        return measured_keys(self.settings)

    def value(self, key: str) -> str:
        """Return a setting as on the command line, or the choice of a group; empty if the run has no such setting."""
        if key in self.choices:
            return self.choices[key]
        value: Any = self.settings
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return self.overrides.get(key, "")
            value = value[part]
        return self.overrides.get(key, "") if isinstance(value, dict) else "null" if value is None else as_text(value)


def _result_in(line: Mapping[str, Any], name: str) -> Score | None:
    """Return a result in a line of ``metrics.jsonl``; None if it was not measured in this round."""
    results, units = line.get("evaluation", {}), line.get("units", {})
    label_free = LABEL_FREE.get(name)
    if label_free is not None:
        health = line.get("health")
        results, name = (health.get("global") if isinstance(health, dict) else {}), label_free
    value = results.get(name) if isinstance(results, dict) else None
    unit = "" if label_free else str(units.get(name, ACCURACY)) if isinstance(units, dict) else ACCURACY
    return Score(float(value), unit) if value is not None and finite_number(value) else None


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Read the runs at or below folders, each once. A folder without a run is an `InputError`.

    Runs with damaged files are left out and logged; if no other is left, the first one is an `InputError`.
    """
    runs: dict[Path, Run] = {}
    errors: list[InputError] = []
    for folder in folders:
        paths = run_folders(folder)
        if not paths:
            problem = "there is no run in" if folder.is_dir() else "there is no folder"
            raise InputError(f"{problem} {folder}; give the folders of runs or of sweeps, e.g. runs/* or multirun/*")
        for path in paths:
            try:
                runs[path.resolve()] = runs.get(path.resolve()) or read_run(path)
            except InputError as error:
                errors.append(error)
    if errors and not runs:
        raise errors[0]
    for damage in errors:
        log_once(logging.WARNING, f"a run is left out: {damage}")
    return list(runs.values())


def read_run(folder: Path) -> Run:
    """Read a run folder. A damaged ``summary.json`` counts as missing, another damaged file is an `InputError`."""
    running = is_locked(folder)  # first: a process writes the summary before it releases the lock
    summary, settings = read_summary(folder / "summary.json"), read_yaml(folder / "config.yaml", dict)
    words = summary["overrides"] if summary else read_overrides(folder / "overrides.yaml") or []
    command_overrides = tuple(word for word in words if word.partition("=")[0] not in START_KEYS)
    own = {
        key.lstrip("+"): value
        for key, _, value in (sanitize(plain_override(word)).partition("=") for word in command_overrides)
    }
    if measured := measured_keys(settings):
        own = {key: value for key, value in own.items() if key not in measured} | {measured[0]: FEDERATED}
    choices = _read_choices(folder / "choices.yaml") or {
        key: value for key, value in own.items() if key in config_groups()
    }
    names = {sanitize(group): sanitize(name) for group, name in choices.items()}
    return Run(folder, own, command_overrides, names, settings, summary, running)


def _read_choices(file: Path) -> dict[Any, Any] | None:
    if not (read_text(file) or "\n").endswith(("\n", "}")):  # valid YAML, but with another choice
        raise corrupt_file_error(file, "its last line is cut off")
    choices: dict[Any, Any] | None = read_yaml(file, dict)
    return choices


def is_locked(folder: Path) -> bool:
    """Return whether a process works on the run or the sweep of a folder."""
    try:
        with open_regular_file(folder / LOCK_FILE) as stream:
            return locks.is_locked(stream.fileno())
    except OSError:  # missing, or not a regular file
        return False


def flatten_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted keys and values of nested settings as text."""
    return {sanitize(key): as_text(value) for key, value in flatten(settings)}


def strategy_of(folder: Path) -> str:
    """Return the strategy of a run folder; empty if it is unknown."""
    return read_run(folder).value("strategy")


def write_summary(file: Path, summary: Mapping[str, Any]) -> None:
    """Write a run's ``summary.json`` with a checksum, by which `read_summary` detects damage."""
    content = json.loads(json.dumps(summary))  # keys and sequences as they will be read
    write_text(file, json.dumps({**content, "checksum": _checksum(content)}, indent=2) + "\n")


def _checksum(summary: Mapping[str, Any]) -> str:
    return checksum(json.dumps(summary, sort_keys=True).encode())


def read_summary(file: Path) -> dict[str, Any] | None:
    """Read a run's ``summary.json``; return None if it is missing, damaged or of another program."""
    try:
        summary = json.loads(read_text(file) or "")
    except (ValueError, RecursionError):
        return None
    if not (isinstance(summary, dict) and _is_summary(summary)):
        return None
    if summary.pop("checksum", None) not in (None, _checksum(summary)):  # earlier versions stored none
        return None
    return summary


def _is_summary(summary: dict[str, Any]) -> bool:
    needed = {"status": text, "reason": optional(text)}
    needed |= {"overrides": lambda value: isinstance(value, list) and all(map(text, value))}
    if summary.get("status") == "finished":
        needed |= {"final": mapping_of(mapping_of(finite_number))}
    allowed = {"units": optional(mapping_of(text)), "base": lambda value: isinstance(value, dict)}
    return needed.keys() <= summary.keys() and all(
        kind(summary[key]) for key, kind in (needed | allowed).items() if key in summary
    )


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders at or below a folder and its links by name, each once; `PermissionError` if closed."""
    folders, visited = list[Path](), set[Path]()  # none within a run, a folder of settings or a hidden one

    def report(error: OSError) -> None:
        if isinstance(error, PermissionError) and error.filename == str(folder):
            raise error
        if isinstance(error, PermissionError):
            log_once(logging.WARNING, f"{error.filename} is left out ({error.strerror})")

    for path, subfolders, files in os.walk(folder, onerror=report, followlinks=True):
        here, resolved = Path(path), Path(path).resolve()
        if resolved in visited:
            subfolders.clear()
            continue
        visited.add(resolved)
        links_last = sorted(((here / name).is_symlink(), name) for name in subfolders if not name.startswith("."))
        subfolders[:] = [name for _, name in links_last]
        if set(RUN_MARKERS) & set(files):
            subfolders.clear()
            if not _is_settings_folder(here, files):
                folders.append(here)
    return sorted(folders, key=_natural)


def _is_settings_folder(folder: Path, files: Sequence[str]) -> bool:
    """Return whether this is a folder such as ``conf/``, whose ``config.yaml`` has a defaults list."""
    if [name for name in RUN_MARKERS if name in files] != ["config.yaml"]:
        return False
    try:
        return re.search("^defaults:", read_text(folder / "config.yaml") or "", re.MULTILINE) is not None
    except InputError:
        return False


def _natural(path: Path) -> list[Any]:
    """Return a sort key that puts job 10 after job 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]
