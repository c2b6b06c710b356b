"""Terminal output and log of a run: progress lines, a progress bar on a terminal, and ``run.log``.

    round 12/200  loss 4.810  cosine 0.9812  knn 61.3%  14.2 s/round  44 min left
    ⠹ ━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━ 12/200 0:02:51 44 min left  loss 4.810  knn 61.3% (round 10)

The bar is for a terminal of the command itself. A pipe, a file, a CI runner, the engine on Ray and Flower's own
runtime get log lines only.
"""

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from fedssl.config.saved_run import resume_command
from fedssl.errors import DISK_ERRORS, RunError, disk_remedy, sanitize
from fedssl.evaluation.scores import Score
from fedssl.logs import log

IS_ROUND = "is_round"  # attribute of the log records of rounds
WAITING_INTERVAL = 30.0  # seconds between two warnings of a wait
_MAX_RECORDS = 10_000  # of the log before a run folder exists
_PER_SECOND = 2  # refresh rate of the bar


@dataclass(frozen=True, kw_only=True)
class ProgressSnapshot:
    """Progress of a run after a round, with its line of ``metrics.jsonl`` and its results."""

    line: Mapping[str, Any]
    evaluation: Mapping[str, Score]
    rounds: int
    seconds_per_round: float

    @property
    def round(self) -> int:
        return int(self.line["round"])

    @property
    def loss(self) -> list[str]:
        return [] if self.line["loss"] is None else [f"loss {self.line['loss']:.3f}"]

    @property
    def results(self) -> list[str]:
        return [f"{name} {score.text}" for name, score in self.evaluation.items()]

    @property
    def eta(self) -> str:
        return f"{duration(self.seconds_per_round * (self.rounds - self.round))} left"

    @property
    def log_line(self) -> str:
        parts = [f"round {self.round}/{self.rounds}", *self.loss]
        if (cosine := self.line["model_cosine"]) is not None:
            parts.append(f"cosine {cosine:.4f}")
        parts += self.results
        if self.line["dropped"]:
            parts.append(f"{len(self.line['dropped'])} dropped")
        if (seconds := self.line.get("virtual_time")) is not None:
            parts.append(f"virtual time {f'{seconds:.1f} s' if seconds < 90 else duration(seconds)}")
        return "  ".join([*parts, f"{self.seconds_per_round:.1f} s/round", self.eta])


def duration(seconds: float) -> str:
    """Format seconds for people: ``45 s``, ``12 min`` or ``1.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def described(snapshot: ProgressSnapshot, results: str) -> tuple[str, str]:
    """Return the latest results, by default ``results`` of an earlier round, and the text for a bar with them."""
    if snapshot.evaluation:
        results = f"{'  '.join(snapshot.results)} (round {snapshot.round})"
    last = snapshot.round == snapshot.rounds
    parts = ("last evaluation" if last else snapshot.eta, *snapshot.loss, sanitize(results))
    return results, "  ".join(part for part in parts if part)


class PlainConsole:
    """Console with log lines only."""

    def handler(self) -> logging.Handler:
        return _LogLines(sys.stdout)

    def open(self, rounds: int) -> None:
        """Start to show a run."""

    def set_completed(self, round: int) -> None:
        """Show the completed rounds of a resumed run."""

    def show(self, snapshot: ProgressSnapshot) -> None:
        """Show the progress of the run."""

    def close(self) -> None:
        """Remove everything but log lines."""


class _LogLines(logging.StreamHandler[TextIO]):
    """Handler that writes to the null device once its stream is closed, as after ``| head -1``: ``run.log`` has all.

    Lines for which the disk of the stream has no room are missing there.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        elif not isinstance(error, OSError):
            super().handleError(record)


class ProgressBar(PlainConsole):
    """Console of a terminal with log lines, and a bar with rounds, time, loss and the latest results below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._results = ""
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
            transient=True,
            refresh_per_second=_PER_SECOND,
        )
        self._task = self._bar.add_task("preparing", total=None)

    def handler(self) -> logging.Handler:
        return _LogAboveBar(self._console)

    def open(self, rounds: int) -> None:
        self._bar.update(self._task, total=rounds)
        self._bar.start()

    def set_completed(self, round: int) -> None:
        self._bar.update(self._task, completed=round)

    def show(self, snapshot: ProgressSnapshot) -> None:
        self._results, text = described(snapshot, self._results)
        self._bar.update(self._task, completed=snapshot.round, description=text)

    def close(self) -> None:
        self._bar.stop()


class NotebookProgress(PlainConsole):
    """Console of a notebook: one line of output that is updated, below log lines other than those of rounds."""

    def __init__(self) -> None:
        self._results = ""
        self._display: Any = None

    def handler(self) -> logging.Handler:
        handler = super().handler()
        handler.addFilter(lambda record: IS_ROUND not in vars(record))
        return handler

    def open(self, rounds: int) -> None:
        display = sys.modules["IPython.display"].display  # of the notebook, which has imported it
        self._display = display(_formats(0, rounds, "preparing"), raw=True, display_id=True)

    def show(self, snapshot: ProgressSnapshot) -> None:
        self._results, text = described(snapshot, self._results)
        self._display.update(_formats(snapshot.round, snapshot.rounds, text), raw=True)


def _formats(round: int, rounds: int, text: str) -> dict[str, str]:
    """Return the progress of a run as plain text and as HTML."""
    plain = f"{round}/{rounds}  {text}"
    html = f'<progress value="{round}" max="{rounds}"></progress> {escape(plain)}'
    return {"text/plain": plain, "text/html": html}


class _LogAboveBar(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.out(self.format(record), highlight=False)
        except Exception:  # as in every handler: a failed log line must not end the run
            self.handleError(record)


def make_screen(*, terminal: bool) -> PlainConsole:
    """Return a progress bar in a notebook or a terminal with a cursor and Unicode, else a plain console.

    ``terminal=False`` if the output is forwarded.
    """
    if _in_notebook():
        return NotebookProgress()
    if not terminal or not sys.stdout.isatty() or os.environ.get("CI"):
        return PlainConsole()
    console = Console(file=sys.stdout)
    can_draw = console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only
    return ProgressBar(console) if can_draw else PlainConsole()


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, as tqdm detects it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


@contextmanager
def log_to_console() -> Iterator[list[logging.LogRecord]]:
    """Log to the console, and yield the records for the log file of a run whose folder does not exist yet.

    The list is filled at the end.
    """
    records: list[logging.LogRecord] = []
    buffer = BufferingHandler(_MAX_RECORDS)
    with _handlers({PlainConsole().handler(): "%(message)s", buffer: "%(message)s"}):
        yield records
        records += buffer.buffer  # which is cleared when the handler is closed


@contextmanager
def log_to(folder: Path, screen: PlainConsole, *, earlier: Iterable[logging.LogRecord] = ()) -> Iterator[None]:
    """Log to the console, and with local times to ``run.log`` in the run folder, after ``earlier`` records."""
    file = _LogFile(folder / "run.log")
    with _handlers({screen.handler(): "%(message)s", file: "%(asctime)s %(message)s"}):
        for record in earlier:
            file.handle(record)
        yield
    if file.problem is not None:
        raise disk_error(folder, file.problem)


@contextmanager
def _handlers(handlers: Mapping[logging.Handler, str]) -> Iterator[None]:
    """Log to these handlers, each with its format, and nowhere else."""
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler, line in handlers.items():
        handler.setFormatter(_SanitizingFormatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
        log.setLevel(level)
        log.propagate = propagate


class _SanitizingFormatter(logging.Formatter):
    """Formatter that removes control characters, because log lines contain text of clients and foreign files."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize(super().format(record), lines=True)


class _LogFile(logging.FileHandler):
    """Log file that stores why a line could not be written, instead of printing a traceback for each line."""

    problem: OSError | None = None

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.problem = error
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            self.problem = error


@contextmanager
def disk_errors_as_run_error(folder: Path, *, check_place: Callable[[], None]) -> Iterator[None]:
    """Translate disk errors, such as a full disk, into a `RunError`; ``check_place`` raises it for a missing folder."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            check_place()
        if error.errno not in DISK_ERRORS:
            raise
        raise disk_error(folder, error) from error


def disk_error(folder: Path, error: OSError) -> RunError:
    """Return the error of a run folder that cannot be written any more."""
    remedy = f"continue with {resume_command(folder)}" if (folder / "config.yaml").exists() else "start the run again"
    return RunError(f"{folder} cannot be written ({error.strerror or error}); {disk_remedy(error)}, then {remedy}")


@contextmanager
def log_while_waiting(what: str) -> Iterator[None]:
    """Log a warning at regular intervals while the block waits."""
    start, done = time.monotonic(), threading.Event()

    def warn() -> None:
        while not done.wait(WAITING_INTERVAL):
            log.warning("%s (waiting for %.0f s so far)", what, time.monotonic() - start)

    thread = threading.Thread(target=warn, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
