"""Run folders as they lie on the disk: which there are, what their settings are called, and how they ended."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedssl.errors import InputError
from fedssl.evaluation.scores import Score, as_scores
from fedssl.words import groups

# Any of these makes a folder that of a run: one that was refused has the first only, one that was killed the others.
MARKS = ("summary.json", "config.yaml", "run.log")


@dataclass(frozen=True)
class Run:
    """A run, finished or not.

    Attributes
    ----------
    folder : Path
    words : dict
        Key to value, of the command line that gave the settings.
    choices : dict
        The choice in every group of the configuration, by whatever it was made; of a folder without ``choices.yaml``
        only those among the words.
    settings : DictConfig or None
        All settings, resolved; None if it ended before they were found usable.
    summary : dict or None
        How it ended; None if it goes on, or was ended from outside.
    """

    folder: Path
    words: dict[str, str]
    choices: dict[str, str]
    settings: DictConfig | None
    summary: dict[str, Any] | None

    @property
    def finished(self) -> bool:
        """Whether all rounds ran and the results are there."""
        return self.summary is not None and self.summary["status"] == "finished"

    @property
    def results(self) -> dict[str, Score]:
        """What the federated encoder is worth, by protocol; none without a finished evaluation."""
        if self.summary is None or not self.finished:
            return {}
        return as_scores(self.summary["final"].get("federated", {}), self.summary.get("units"))

    @property
    def ending(self) -> str:
        """Why there are no results, in one line."""
        if self.summary is None:
            return "no readable summary.json, so it still runs or was ended from outside"
        return " ".join((self.summary["reason"] or self.summary["status"]).split())

    def value(self, key: str) -> str:
        """Tell a setting as on the command line, a choice by its name; empty where the run has no such setting."""
        if key in self.choices:
            return self.choices[key]
        value = None
        if self.settings is not None and re.fullmatch(r"[\w.]+", key):
            value = OmegaConf.select(self.settings, key)
        return self.words.get(key, "") if value is None or OmegaConf.is_dict(value) else str(value)


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Find the runs that the folders are, or that lie below them, each once.

    Raises
    ------
    InputError
        A folder does not exist, or there is no run in it.
    """
    found: dict[Path, Run] = {}
    for folder in folders:
        runs = sorted(_below(folder), key=_natural)
        if not runs:
            problem = "there is no run in" if folder.is_dir() else "there is no folder"
            raise InputError(f"{problem} {folder}; give the folders of runs or of sweeps, e.g. runs/* or multirun/*")
        found |= {run.resolve(): read_run(run) for run in runs if run.resolve() not in found}
    return list(found.values())


def read_run(folder: Path) -> Run:
    """Read what the files of a run folder tell; one that is missing or cut short counts as not written."""
    summary, settings = _read_summary(folder), _read_yaml(folder / "config.yaml")
    words = summary["overrides"] if summary else _read_yaml(folder / "overrides.yaml")
    pairs = dict(str(word).partition("=")[::2] for word in words or [])
    own = {key.lstrip("+"): value for key, value in pairs.items() if key not in ("output_dir", "resume")}
    choices = _read_yaml(folder / "choices.yaml") or {key: value for key, value in own.items() if key in groups()}
    return Run(folder, own, {str(group): str(name) for group, name in choices.items()}, settings, summary)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a JSONL file, none if it is missing; a last line that a crash cut short is left out."""
    if not file.exists():
        return []
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _below(folder: Path) -> Iterator[Path]:
    """Run folders at or below ``folder``; there are none within a run."""
    for place, inner, files in os.walk(folder):
        if set(MARKS) & set(files):
            inner.clear()
            yield Path(place)


def _natural(path: Path) -> list[Any]:
    """Sorts job 10 behind job 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _read_summary(folder: Path) -> dict[str, Any] | None:
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    ours = isinstance(summary, dict) and {"status", "reason", "overrides"} <= summary.keys()
    return summary if ours else None


def _read_yaml(file: Path) -> Any:
    return OmegaConf.load(file) if file.is_file() else None
