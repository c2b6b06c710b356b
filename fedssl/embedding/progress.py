"""A progress bar on the terminal, while images are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn


@contextmanager
def progress_bar(total: int, *, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of images that are done; it shows nothing outside of a terminal."""
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=total, completed=done)
        yield lambda number: bar.update(task, completed=number)
