"""Progress of a sweep: a line for each job that ends and, in a terminal, a live table of the running jobs."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedssl.errors import InputError, sanitize
from fedssl.evaluation.scores import Score
from fedssl.logs import print_line
from fedssl.runs.run import Run, read_run
from server_app.console import duration

REFRESH_PER_SECOND = 1
MAX_ROWS = 20  # of the live table


class SweepProgress:
    """Counts of the jobs in ``folders``, estimated time left, and best results of a sweep.

    ``metric`` is the only result whose best value is displayed; None: all final results.
    """

    def __init__(self, folders: Sequence[Path], *, metric: str | None = None) -> None:
        self._folders, self._metric = folders, metric
        self._work = float(len(folders))
        self._start, self._done = time.monotonic(), 0.0
        self._failed = 0
        self._ended = set[Path]()
        self._best: dict[str, tuple[Score, str]] = {}  # result and job by name

    def expect(self, work: float) -> None:
        """Set the work of all jobs, in any unit; by default that of each is 1."""
        self._work = work

    def end(self, folder: Path, reason: str | None, *, work: float) -> None:
        """Print the outcome of a job after this part of the work, and the progress of the sweep."""
        run = read_run(folder)
        self._done += work
        self._failed += reason is not None
        if reason is not None or run.finished:
            self._ended.add(folder)
        outcome = f"failed: {reason}" if reason is not None else self._outcome(run)
        print_line(f"[job {folder.name}] {outcome}\n  {self.line()}")

    def prune(self, folder: Path, reason: str) -> None:
        """Print why a job does not continue."""
        self._ended.add(folder)
        print_line(f"[job {folder.name}] {reason}")

    def line(self) -> str:
        """Return the progress of the sweep in one line."""
        parts = [f"{len(self._ended)} of {len(self._folders)} jobs ended", f"{self._failed} failed"]
        if self._done and len(self._ended) < len(self._folders):
            left = max(self._work - self._done, 0.0) * (time.monotonic() - self._start) / self._done
            parts.append(f"about {duration(left)} left")
        parts += [f"best {name} {score.text} (job {number})" for name, (score, number) in self._best.items()]
        return ", ".join(parts)

    def live(self, running: Callable[[], Mapping[Path, Sequence[str]]]) -> AbstractContextManager[object]:
        """Show the progress and the running jobs below all printed lines, in a terminal.

        ``running`` returns the swept overrides of the jobs that may run, by folder.
        """
        console = Console()
        if not console.is_terminal or console.is_dumb_terminal or os.environ.get("CI"):
            return nullcontext()
        return Live(
            console=console,
            get_renderable=lambda: self.table(running()),
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
        )

    def _outcome(self, run: Run) -> str:
        if not run.finished:
            score = None if self._metric is None else run.score(self._metric, round=run.rounds_done)
            return run.failure_reason + ("" if score is None else f", {self._metric} {score.text}")
        results = run.results
        if self._metric is not None:
            score = run.score(self._metric)
            results = {} if score is None else {self._metric: score}
        for name, score in results.items():
            if name not in self._best or score.goodness > self._best[name][0].goodness:
                self._best[name] = (score, run.folder.name)
        return "finished" + "".join(f" {name} {score.text}" for name, score in results.items())

    def table(self, running: Mapping[Path, Sequence[str]]) -> RenderableType:
        """Return the live table for the swept overrides of the jobs that may run, by folder."""
        rows = [(folder, overrides) for folder, overrides in running.items() if (folder / "run.log").exists()]
        table = Table("job", "rounds", "settings", box=None, header_style="bold")
        for folder, overrides in rows[:MAX_ROWS]:
            table.add_row(*map(Text, (folder.name, _rounds(folder), sanitize(" ".join(overrides)))))
        waiting = len(running) - len(rows)
        return Group(table, Text(f"{len(rows)} running, {waiting} waiting, {self.line()}"))


def _rounds(folder: Path) -> str:
    try:
        return read_run(folder).progress.removesuffix(" rounds")
    except InputError:  # the job is writing its files
        return ""
