"""All runs below some folders, found again and again; runs may appear, end and vanish at any time."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from fedssl.digests import identity
from fedssl.errors import sanitize
from fedssl.runs.run import run_folders
from fedssl.watch.live_run import BASELINES, LiveRun

MAX_RUNS, MAX_CURVES = 500, 12
_PAUSE = 0.5  # seconds during which several browser windows get the same values
_SEARCH_SHARE = 0.1  # of the time, at most, is spent on the search for new runs


class Watcher:
    """The runs below ``folders``, which need not exist. Several threads may use it."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._runs: dict[str, LiveRun] = {}
        self._next_search = self._next_update = 0.0
        self._lock = Lock()

    def overview(self) -> dict[str, Any]:
        """Return a row for each run, those that run first, then the newest; and the folders without a run."""
        with self._lock:
            self._update()
            listed = [(run.overview(curve=False), key, run) for key, run in self._runs.items()]
            listed.sort(key=lambda row: (row[0]["state"].startswith("running"), row[0]["date"]), reverse=True)
            rows = [
                {"id": key, "name": self._name(run.folder), **(run.overview(curve=True) if n < MAX_CURVES else row)}
                for n, (row, key, run) in enumerate(listed[:MAX_RUNS])
            ]
            found = [run.folder for run in self._runs.values()]
            waiting = [
                sanitize(folder) for folder in self._folders if not any(path.is_relative_to(folder) for path in found)
            ]
            return {"runs": rows, "more": len(listed) - len(rows), "waiting": waiting}

    def details(self, key: str) -> dict[str, Any] | None:
        """Return everything about a run by its id; None if there is no such run (any more)."""
        with self._lock:
            self._update()
            run = self._runs.get(key)
            if run is None:
                return None
            details = {"id": key, "name": self._name(run.folder), **run.details()}
            baselines = {kind: self._baseline(run, kind) for kind in (BASELINES if run.has_baselines else ())}
            missing = [kind for kind, found in baselines.items() if run.evaluation and not found]
            note = f"no line of {' and '.join(missing)}, until a run with the same task has ended" if missing else ""
            return details | {"baselines": baselines, "note": note}

    def _baseline(self, run: LiveRun, kind: str) -> dict[str, float]:
        """Return the baseline of a run: before its end that of another one whose baseline is the same."""
        task = run.baseline_task(kind)
        others = (other for other in self._runs.values() if task is not None and other.baseline_task(kind) == task)
        found = next(filter(None, (of.baselines(kind) for of in (run, *others))), {})
        return {sanitize(name): value for name, value in found.items() if name in run.evaluation}

    def _update(self) -> None:
        now = time.monotonic()
        if now < self._next_update:
            return
        if now >= self._next_search:
            found = dict.fromkeys(path for folder in self._folders for path in run_folders(folder))
            known = {run.folder: (key, run) for key, run in self._runs.items()}
            entries = [known.get(path) or (identity(os.fsencode(path))[:16], LiveRun(path)) for path in found]
            self._runs = dict(entries)
            self._next_search = time.monotonic() + (time.monotonic() - now) / _SEARCH_SHARE
        for run in self._runs.values():
            run.update()
        self._next_update = time.monotonic() + _PAUSE

    def _name(self, folder: Path) -> str:
        """Return the path from the only watched folder, or the path below all of them."""
        if len(self._folders) == 1 and folder != self._folders[0]:
            return sanitize(folder.relative_to(self._folders[0]))
        return sanitize(folder)
