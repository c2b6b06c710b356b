"""The report as one page of HTML that needs nothing else: no network, no other file, and no script to be read.

All words of run folders are escaped, and the page forbids the browser (Content-Security-Policy) to load anything and to
run any script but the one that sorts tables.
"""

import hashlib
import io
import re
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from fedssl.plots.registry import PLOTS
from fedssl.plots.style import sanitize_texts
from fedssl.runs.groups import OWN_KEYS, group_by_seed
from fedssl.runs.run import Run
from fedssl.text_table import TableCell, TableData, TextTable, text_cell
from fedssl.untrusted import sanitize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE, SCRIPT = ((Path(__file__).parent / f"page.{end}").read_text(encoding="utf-8") for end in ("css", "js"))
KEY_COLUMNS = (2, 4)  # min and max columns of words before the numbers; the others come after the numbers
LONG_TEXT = 40  # signs of a text from which on it may be broken
# Of one run: what a plot shows, and the file with its numbers.
RUN_PLOTS = {
    "metrics": ("loss and results over the rounds", "metrics.jsonl"),
    "cosines": ("cosines of clients' models with the global one", "clients.jsonl"),
    "partition": ("who holds what", "partition.csv"),
}
_DRAWN: dict[tuple[Path, str], tuple[tuple[int, int], str]] = {}  # figures by file and name, for the next page
_TARGET = "._target_"
_NUMBER = re.compile(r"\d+\.\d+")
_SPACES = re.compile(r"^\{.*\}")  # before a name: the place in which XML defines it
_LEFT_OUT = ("metadata", "style")


def page(runs: Sequence[Run], tables: Sequence[TextTable], *, again: float | None = None) -> str:
    """Write the page.

    Parameters
    ----------
    runs : sequence of Run
    tables : sequence of TextTable
        The results.
    again : float or None
        The page is written anew every so many seconds, and loads itself again; None: it is the last one.
    """
    parts = [
        "<h1>Report of federated runs</h1>",
        f'<p class="faint">{text(_count(runs))}</p>',
        *(_section(*table.data().without_constants()) for table in tables),
        *_figures("Figures", figures_of_all(runs)),
        _section(settings_table(runs)) if len(runs) > 1 else "",
        _section(status_table(runs)),
        *_figures("Figures of single runs", figures_of_each(runs)),
    ]
    return _document("\n".join(filter(None, parts)), again)


def text(words: object) -> str:
    """Words of anybody, which are no markup and no command."""
    return escape(sanitize(words))


def _document(body: str, again: float | None) -> str:
    digest = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    policy += "; base-uri 'none'; form-action 'none'"
    refresh = "" if again is None else f'<meta http-equiv="refresh" content="{max(1, round(again))}">\n'
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Report of federated runs</title>\n<style>\n{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _count(runs: Sequence[Run]) -> str:
    finished, running = (sum(found) for found in ((run.finished for run in runs), (run.running for run in runs)))
    other = len(runs) - sum(run.finished or run.running for run in runs)
    told = f"{finished} of {len(runs)} runs finished, {running} running, {other} ended otherwise"
    return told + (f"; as of {time.strftime('%Y-%m-%d %H:%M:%S')}" if running else "")


def _section(data: TableData, same: Mapping[str, str] | None = None) -> str:
    """A table under its title, and above it the settings that are the ``same`` in all rows."""
    told = ", ".join(f"{key}={value}" for key, value in (same or {}).items())
    head = f'<p class="faint">In all rows: {text(told)}.</p>\n' if told else ""
    rule = f'<p class="faint">Bold: {text(data.mark_caption)}.</p>' if data.mark_caption else ""
    notes = "".join(
        f"<h3>{text(title)}</h3>\n<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>\n"
        for title, lines in data.notes.items()
    )
    table = _table(data) if data.rows else "<p>None.</p>"
    return f"<section>\n<h2>{text(data.title)}</h2>\n{head}{table}\n{rule}{notes}</section>"


def _table(data: TableData) -> str:
    kinds = ["" if column < data.left else ' class="number"' for column in range(len(data.header))]
    first = _telling_apart(data)
    order = sorted(range(len(kinds)), key=lambda column: column < data.left and column not in first)
    header = "".join(f'<th scope="col"{kinds[column]}>{text(data.header[column])}</th>' for column in order)
    rows = "".join(f"<tr>{''.join(_cell(row[column], kinds[column]) for column in order)}</tr>\n" for row in data.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(data.title)}">\n'
        f"<table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>"
    )


def _telling_apart(data: TableData) -> set[int]:
    """Columns of words that tell most rows apart together: the leftmost of those that tell most, one by one."""
    min_columns, max_columns = KEY_COLUMNS
    chosen: list[int] = []

    def told(column: int) -> int:
        return len({tuple(row[one].text for one in [*chosen, column]) for row in data.rows})

    while len(chosen) < min(max_columns, data.left):
        best = max((column for column in range(data.left) if column not in chosen), key=told)
        if len(chosen) >= min_columns and told(best) == told(chosen[0]):
            break  # no other tells more rows apart
        chosen.append(best)
    return set(chosen)


def _cell(one: TableCell, kind: str) -> str:
    value = "" if one.value is None else f' data-value="{one.value!r}"'
    long = ' class="long"' if len(one.text) > LONG_TEXT else ""
    words = text(one.text)
    if one.text.startswith("fedssl "):
        words = f"<code>{words}</code>"
    elif one.best:
        words = f"<strong>{words}</strong>"
    return f"<td{kind or long}{value}>{words}</td>"


def _figures(title: str, figures: Sequence[tuple[str, str]]) -> list[str]:
    """A section of figures: each its caption and its elements, closed but for a first one alone."""
    if not figures:
        return []
    opened = " open" if len(figures) == 1 else ""
    shown = [
        f"<details{opened}><summary>{text(caption)}</summary>\n"
        f'<div class="scroll" tabindex="0">\n{svg}\n</div></details>'
        for caption, svg in figures
    ]
    return [f"<section>\n<h2>{text(title)}</h2>", *shown, "</section>"]


def figures_of_all(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Caption and element of the figures of all runs together; runs that go on only where no seed has finished."""
    shown = [run for one in _groups(runs) for run in ([own for own in one if own.finished] or one)]
    caption = "accuracy over rounds, over bytes and over FLOPs of a client"
    data = PLOTS["accuracy"].plot(shown) if shown else None
    return [(caption, inline(data.figure, name="all", label=caption, kind="wide"))] if data else []


def figures_of_each(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Caption and element of the figures of single runs: the first of those that differ only in their seed."""
    found: list[tuple[str, str]] = []
    for number, run in enumerate(one[0] for one in _groups(runs)):
        for kind, (plot, (shows, file)) in enumerate(RUN_PLOTS.items()):
            caption = f"{run.folder}: {shows}"
            element = _drawn(run.folder / file, plot, name=f"run{number}-{kind}", label=caption)
            if element:
                found.append((caption, element))
    return found


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that finished or go on, those together that differ only in their seed; those that finished come first."""
    alive = [run for run in runs if run.finished or run.running]
    return [one.runs for one in group_by_seed(sorted(alive, key=lambda run: not run.finished))]


def _drawn(file: Path, plot: str, *, name: str, label: str) -> str:
    """The figure of this file, drawn anew only if the file has changed; empty if there is nothing to draw."""
    if not file.is_file():
        return ""
    found = file.stat()
    stamp = (found.st_mtime_ns, found.st_size)
    known = _DRAWN.get((file, name))
    if known is None or known[0] != stamp:
        data = PLOTS[plot].plot(file.parent)
        known = (stamp, inline(data.figure, name=name, label=label) if data else "")
        _DRAWN[file, name] = known
    return known[1]


def status_table(runs: Sequence[Run]) -> TableData:
    """A row for each run: folder, state, rounds done, seed, the command that repeats it, and why it did not finish."""
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
    return TableData("Runs", header, rows, left=len(header))


def settings_table(runs: Sequence[Run]) -> TableData:
    """Every setting in which runs differ, a column for each; with more settings than runs a column for each run.

    What a run does not have is empty, which is no difference where nothing but its words is known. A class is left out
    where the choice that stands for it differs as well.
    """
    settings = [run.all_settings for run in runs]
    whole = [run.settings is not None for run in runs]
    keys = dict.fromkeys(key for one in settings for key in one if key not in OWN_KEYS)
    values = {
        key: {one.get(key, "") for one, all_of_it in zip(settings, whole, strict=True) if all_of_it or key in one}
        for key in keys
    }
    differ = [key for key in keys if len(values[key]) > 1]
    differ = [key for key in differ if not (key.endswith(_TARGET) and key.removesuffix(_TARGET) in differ)]
    folders = [str(run.folder) for run in runs]
    header, rows = ["setting", *folders], [[key, *(one.get(key, "") for one in settings)] for key in differ]
    if len(differ) <= len(runs):
        header, rows = ["run", *differ], [list(row) for row in zip(folders, *(row[1:] for row in rows), strict=True)]
    body = [[TableCell(first), *map(text_cell, others)] for first, *others in (rows if differ else [])]
    return TableData("Settings in which runs differ", header, body, left=len(header))


def inline(figure: "Figure", *, name: str, label: str, kind: str = "plain") -> str:
    """Write the figure as an element ``svg``, the same for the same figure, with its texts as text.

    Parameters
    ----------
    figure : Figure
        Its texts are made plain, and nothing of it is cut off at the axes any more, for what cuts refers by an address.
    name : str
        Of letters and digits, which no other figure of the page has.
    label : str
        What it shows, for those who cannot see it.
    kind : str
        The class of the element.
    """
    from matplotlib import rc_context

    sanitize_texts(figure)
    for artist in figure.findobj():
        artist.set_clip_on(False)
    stream = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True)
    root = ElementTree.fromstring(stream.getvalue())
    _tidy(root, name)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"class": kind, "role": "img", "aria-label": sanitize(label)}
    return ElementTree.tostring(root, encoding="unicode")


def _tidy(root: ElementTree.Element, name: str) -> None:
    """Drop what a page does not need, and put ``name`` before the names by which elements refer to each other."""
    for parent in list(root.iter()):
        for child in [child for child in parent if _SPACES.sub("", child.tag) in _LEFT_OUT]:
            parent.remove(child)
    for element in root.iter():
        element.tag = _SPACES.sub("", element.tag)
        element.attrib = {_SPACES.sub("", key): value for key, value in element.attrib.items()}
    referred = {element.attrib["href"] for element in root.iter() if "href" in element.attrib}
    for element in root.iter():
        if "#" + (own := element.attrib.pop("id", "")) in referred:
            element.attrib["id"] = f"{name}-{own}"
        if "href" in element.attrib:
            element.attrib["href"] = f"#{name}-{element.attrib['href'].removeprefix('#')}"
        if "d" in element.attrib:  # a hundredth of a point is finer than any screen
            element.attrib["d"] = " ".join(
                _NUMBER.sub(lambda found: f"{float(found[0]):.2f}", element.attrib["d"]).split()
            )
