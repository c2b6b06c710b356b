"""The report as one HTML page without external resources, readable without scripts; its markup is ``page.html.j2``.

Figures that compare runs and the partitions come first, tables next, figures of single runs last. Figures are SVG
images, which a browser isolates from the page.
"""

import itertools
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedssl.errors import InputError
from fedssl.evaluation.scores import Score, column_title
from fedssl.pages import base64_of, hide_paths, render
from fedssl.plots.registry import PLOTS
from fedssl.plots.style import sanitize_texts
from fedssl.report.accuracy_table import score_cell
from fedssl.runs.groups import OWN_KEYS, RunGroup, group_by_seed
from fedssl.runs.run import Run
from fedssl.text_table import TableCell, TextTable, text_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY_COLUMNS = (2, 4)  # minimum and maximum number of text columns before the numbers; the others follow the numbers
LONG_TEXT = 40  # characters from which on a text may be broken
WIDE = 8  # inches from which on a figure has the width of the page
MAX_PARTITIONS = 3  # figures at the top; more are below the tables
# Caption of a run's plot, and the file with its numbers.
RUN_PLOTS = {
    "metrics": ("loss and results over the rounds", "metrics.jsonl"),
    "cosines": ("cosines of clients' models with the global one", "clients.jsonl"),
}
SWEPT = {
    "sensitivity": "final accuracy over a swept setting",
    "heatmap": "final accuracy over two swept settings",
    "critical_difference": "mean ranks of strategies; bars connect those that do not differ significantly (Nemenyi)",
}
PLOTS_OF_ALL = {
    "accuracy": "accuracy over rounds, over bytes and over FLOPs of a client",
    "tradeoff": "accuracy on another data set over that on the run's own",
    **SWEPT,
}
ENCODERS = ("untrained", "federated", "pixels")
_CACHE: dict[tuple[Path, str], tuple[tuple[int, int], str]] = {}  # figures by file and plot, for the next page
_TARGET = "._target_"


@dataclass(frozen=True)
class PageImage:
    """A figure as SVG in base64, with its caption and the class of its element."""

    caption: str
    data: str
    kind: str = "plain"


def page(runs: Sequence[Run], tables: Sequence[TextTable], *, again: float | None = None) -> str:
    """Return the page of results. It reloads itself after ``again`` seconds; None: never."""
    encoders = encoder_table(runs)
    shown = [*tables, *([encoders] if encoders.rows else [])]
    partitions = partition_figures(runs)
    parents = [run.folder.parent for run in runs if run.folder.is_absolute()]
    return render(
        "report/page.html.j2",
        root=Path(os.path.commonpath(parents)) if parents else None,
        again=None if again is None else max(1, round(again)),
        count=_count(runs),
        tables=[table.without_constants() for table in shown],
        first_figures=[*figures_of_all(runs), *partitions[:MAX_PARTITIONS]],
        further_tables=[*([settings_table(runs)] if len(runs) > 1 else []), status_table(runs)],
        last_figures=[*partitions[MAX_PARTITIONS:], *figures_of_each(runs)],
        order=_column_order,
        long_text=LONG_TEXT,
    )


def _count(runs: Sequence[Run]) -> str:
    finished, running = sum(run.finished for run in runs), sum(run.running for run in runs)
    other = len(runs) - sum(run.finished or run.running for run in runs)
    counts = f"{finished} of {len(runs)} runs finished, {running} running, {other} ended otherwise"
    return counts + (f"; as of {time.strftime('%Y-%m-%d %H:%M:%S')}" if running else "")


def _column_order(data: TextTable) -> list[int]:
    """Return the columns of a table as the page orders them: those that tell rows apart, numbers, other text.

    The first are text columns that distinguish most rows, selected greedily from the left.
    """
    min_columns, max_columns = KEY_COLUMNS
    selected: list[int] = []

    def num_distinct(column: int) -> int:
        return len({tuple(row[index].text for index in [*selected, column]) for row in data.rows})

    while len(selected) < min(max_columns, data.left):
        best = max((column for column in range(data.left) if column not in selected), key=num_distinct)
        if len(selected) >= min_columns and num_distinct(best) == num_distinct(selected[0]):
            break  # no other column distinguishes more rows
        selected.append(best)
    return sorted(range(len(data.header)), key=lambda column: column < data.left and column not in selected)


def figures_of_all(runs: Sequence[Run]) -> list[PageImage]:
    """Return caption and image of the figure of all runs."""
    plotted = [run for group in _groups(runs) for run in group]
    figures = []
    for name, caption in PLOTS_OF_ALL.items() if plotted else ():
        with suppress(InputError) if name in SWEPT else nullcontext():  # other settings vary
            data = PLOTS[name].plot(plotted)
            if data:
                kind = "wide" if data.figure.get_figwidth() > WIDE else "plain"
                figures.append(PageImage(caption, svg(data.figure), kind))
    return figures


def partition_figures(runs: Sequence[Run]) -> list[PageImage]:
    """Return an image of each partition, with the first run that has it unless all runs have the same."""
    first: dict[str, Run] = {}
    for run, *_ in _groups(runs):
        first.setdefault(_cached_svg(run.folder / "partition.csv", "partition"), run)
    caption = "images of each client"
    return [
        PageImage(caption if len(first) == 1 else f"{run.folder}: {caption}", data)
        for data, run in first.items()
        if data
    ]


def figures_of_each(runs: Sequence[Run]) -> list[PageImage]:
    """Return images of single runs: of the first of those that differ only in their seed."""
    figures = [
        PageImage(f"{run.folder}: {title}", _cached_svg(run.folder / file, plot))
        for run, *_ in _groups(runs)
        for plot, (title, file) in RUN_PLOTS.items()
    ]
    return [figure for figure in figures if figure.data]


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs that differ only in their seed: the finished ones, or the running ones where none has finished."""
    return [group.runs for group in group_by_seed([run for run in runs if run.finished or run.running])]


def _cached_svg(file: Path, plot: str) -> str:
    """Plot the file if it has changed; return an empty text if there is nothing to plot."""
    if not file.is_file():
        return ""
    status = file.stat()
    stamp = (status.st_mtime_ns, status.st_size)
    cached = _CACHE.get((file, plot))
    if cached is None or cached[0] != stamp:
        data = PLOTS[plot].plot(file.parent)
        cached = _CACHE[file, plot] = (stamp, svg(data.figure) if data else "")
    return cached[1]


def encoder_table(runs: Sequence[Run]) -> TextTable:
    """Compare the federated encoder with the untrained encoder and raw pixels, by the same protocols over seeds."""
    rows: list[tuple[RunGroup, str, dict[str, list[Score]]]] = []
    units: dict[str, str] = {}
    groups = group_by_seed([run for run in runs if run.finished])
    for group in groups:
        for kind in ENCODERS:
            scores: dict[str, list[Score]] = {}
            for run in group.runs:
                for name, score in run.results_of(kind).items():
                    scores.setdefault(name, []).append(score)
                    units.setdefault(name, score.unit)
            rows.append((group, kind, scores))
    header = [*(groups[0].settings if groups else []), "encoder", *itertools.starmap(column_title, units.items())]
    if not any(scores for _, kind, scores in rows if kind != "federated"):
        rows = []
    cells = [
        [
            *map(text_cell, group.settings.values()),
            TableCell(kind),
            *(score_cell(scores.get(name, [])) for name in units),
        ]
        for group, kind, scores in rows
    ]
    return TextTable("Encoders under the same protocols", header, cells, left=len(header) - len(units))


def status_table(runs: Sequence[Run]) -> TextTable:
    """Return a row for each run: folder, state, rounds, seed, command, and why it did not finish."""
    rows = [
        [
            TableCell(str(run.folder)),
            TableCell(run.state),
            TableCell(run.progress, run.rounds_done),
            text_cell(run.seed),
            TableCell(run.command),
            TableCell("" if run.finished or run.running else run.failure_reason),
        ]
        for run in runs
    ]
    header = ["run", "state", "rounds", "seed", "command that repeats it", "why it did not finish"]
    return TextTable("Runs", header, rows, left=len(header))


def settings_table(runs: Sequence[Run]) -> TextTable:
    """Return a column for each setting in which runs differ; with more settings than runs a column for each run.

    Settings that a run does not have are empty. For a run without ``config.yaml``, of which only overrides are known,
    they are no difference. A ``_target_`` is left out if the choice that sets it differs.
    """
    settings = [run.all_settings for run in runs]
    complete = [run.settings is not None for run in runs]
    keys = dict.fromkeys(key for values in settings for key in values if key not in OWN_KEYS)
    values = {
        key: {of_run.get(key, "") for of_run, known in zip(settings, complete, strict=True) if known or key in of_run}
        for key in keys
    }
    differ = [key for key in keys if len(values[key]) > 1]
    differ = [key for key in differ if not (key.endswith(_TARGET) and key.removesuffix(_TARGET) in differ)]
    folders = [str(run.folder) for run in runs]
    header, rows = ["setting", *folders], [[key, *(of_run.get(key, "") for of_run in settings)] for key in differ]
    if len(differ) <= len(runs):
        header, rows = ["run", *differ], [list(row) for row in zip(folders, *(row[1:] for row in rows), strict=True)]
    body = [[TableCell(first), *map(text_cell, others)] for first, *others in (rows if differ else [])]
    return TextTable("Settings in which runs differ", header, body, left=len(header))


def svg(figure: "Figure") -> str:
    """Return a figure as SVG in base64; equal figures give equal text."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(hide_paths(text.get_text()))
    sanitize_texts(figure)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedssl"}):
        return base64_of(lambda stream: figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None}))
