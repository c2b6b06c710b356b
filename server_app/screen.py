"""What standard output shows of a run: the lines of its log, and on a terminal a bar below them.

    ⠹ ━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━ 12/200 0:02:51 44 min left  loss 4.810  knn 61.3% (round 10)

The bar is for whoever sits before the command itself. A pipe, a file, a runner of CI, the engine on Ray and Flower's
own runtime, which hand on what they are given, get the lines alone.
"""

import logging
import os
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from fedssl.untrusted import sanitize
from server_app.progress import ProgressSnapshot

TERMINAL = "terminal"  # in the ServerApp's node configuration: whether somebody may sit before it

_PER_SECOND = 2  # how often the bar is drawn


class PlainConsole:
    """Lines alone."""

    def handler(self) -> logging.Handler:
        """Make what writes the lines of the log."""
        return logging.StreamHandler(sys.stdout)

    def open(self, rounds: int) -> None:
        """Begin to show a run."""

    def set_completed(self, round: int) -> None:
        """Show that a resumed run has done so many rounds."""

    def show(self, snapshot: ProgressSnapshot) -> None:
        """Show how far the run is."""

    def close(self) -> None:
        """Leave nothing behind but lines."""


class ProgressBar(PlainConsole):
    """Lines, and below them a bar with rounds, time, loss and the latest results.

    Parameters
    ----------
    console : Console
        Of a terminal.
    """

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
        """Make what writes above the bar."""
        return _LogAboveBar(self._console)

    def open(self, rounds: int) -> None:
        self._bar.update(self._task, total=rounds)
        self._bar.start()

    def set_completed(self, round: int) -> None:
        self._bar.update(self._task, completed=round)

    def show(self, snapshot: ProgressSnapshot) -> None:
        if snapshot.evaluation:
            self._results = f"{'  '.join(snapshot.results)} (round {snapshot.round})"
        loss = "" if snapshot.loss is None else f"loss {snapshot.loss:.3f}"
        last = snapshot.round == snapshot.rounds
        parts = ("last evaluation" if last else snapshot.eta, loss, sanitize(self._results))
        self._bar.update(self._task, completed=snapshot.round, description="  ".join(part for part in parts if part))

    def close(self) -> None:
        self._bar.stop()


class _LogAboveBar(logging.Handler):
    """Writes lines by the console that draws the bar, which moves down, word for word."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.out(self.format(record), highlight=False)
        except Exception:  # as every handler does: a line that cannot be written ends no run
            self.handleError(record)


def make_screen(*, terminal: bool) -> PlainConsole:
    """Make the bar where standard output is a terminal that can move its cursor, lines elsewhere.

    Parameters
    ----------
    terminal : bool
        Whether it may be one. False: it is handed on to somebody else, whatever it looks like.
    """
    if not terminal or not sys.stdout.isatty() or os.environ.get("CI"):
        return PlainConsole()
    console = Console(file=sys.stdout)
    return ProgressBar(console) if console.is_terminal and not console.is_dumb_terminal else PlainConsole()
