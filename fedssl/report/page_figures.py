"""The figures of the page, as vector graphics."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedssl.plots.comparisons import accuracies
from fedssl.plots.curves import cosines, metrics
from fedssl.plots.groups import group_by_seed
from fedssl.plots.partition import who_holds_what
from fedssl.plots.style import PlotData
from fedssl.report.svg import inline
from fedssl.runs.run import Run

# Of one run: what it shows, how it is drawn, and the file with its numbers.
OF_EACH: tuple[tuple[str, Callable[[Path], PlotData | None], str], ...] = (
    ("loss and results over the rounds", metrics, "metrics.jsonl"),
    ("cosines of clients' models with the global one", cosines, "clients.jsonl"),
    ("who holds what", who_holds_what, "partition.csv"),
)
_DRAWN: dict[tuple[Path, str], tuple[tuple[int, int], str]] = {}  # figures by file and name, for the next page


def figures_of_all(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Caption and element of the figures of all runs together; runs that go on only where no seed has finished."""
    shown = [run for one in _groups(runs) for run in ([own for own in one if own.finished] or one)]
    caption = "accuracy over rounds, over bytes and over FLOPs of a client"
    drawing = accuracies(shown) if shown else None
    return [(caption, inline(drawing.figure, name="all", label=caption, kind="wide"))] if drawing else []


def figures_of_each(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Caption and element of the figures of single runs: the first of those that differ only in their seed."""
    found: list[tuple[str, str]] = []
    for number, run in enumerate(one[0] for one in _groups(runs)):
        for kind, (shows, draw, file) in enumerate(OF_EACH):
            caption = f"{run.folder}: {shows}"
            element = _drawn(run.folder / file, draw, name=f"run{number}-{kind}", label=caption)
            if element:
                found.append((caption, element))
    return found


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that finished or go on, those together that differ only in their seed; those that finished come first."""
    alive = [run for run in runs if run.finished or run.running]
    return [one.runs for one in group_by_seed(sorted(alive, key=lambda run: not run.finished))]


def _drawn(file: Path, draw: Callable[[Path], PlotData | None], *, name: str, label: str) -> str:
    """The figure of this file, drawn anew only if the file has changed; empty if there is nothing to draw."""
    if not file.is_file():
        return ""
    found = file.stat()
    stamp = (found.st_mtime_ns, found.st_size)
    known = _DRAWN.get((file, name))
    if known is None or known[0] != stamp:
        drawing = draw(file.parent)
        known = (stamp, inline(drawing.figure, name=name, label=label) if drawing else "")
        _DRAWN[file, name] = known
    return known[1]
