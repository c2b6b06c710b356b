"""The report as one page of HTML that needs nothing else: no network, no other file, and no script to be read.

All words of run folders are escaped, and the page forbids the browser (Content-Security-Policy) to load anything and to
run any script but the one that sorts tables.
"""

import hashlib
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from fedssl.report.page_figures import figures_of_all, figures_of_each
from fedssl.report.run_tables import settings_table, status_table
from fedssl.report.text_table import TableCell, TableData, TextTable
from fedssl.runs.run import Run
from fedssl.untrusted import sanitize

STYLE, SCRIPT = ((Path(__file__).parent / f"page.{end}").read_text(encoding="utf-8") for end in ("css", "js"))
KEY_COLUMNS = (
    2,
    4,
)  # least and most columns of words before the numbers, for which a page is opened; others stand behind
LONG_TEXT = 40  # signs of a text from which on it may be broken


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
    least, most = KEY_COLUMNS
    chosen: list[int] = []

    def told(column: int) -> int:
        return len({tuple(row[one].text for one in [*chosen, column]) for row in data.rows})

    while len(chosen) < min(most, data.left):
        best = max((column for column in range(data.left) if column not in chosen), key=told)
        if len(chosen) >= least and told(best) == told(chosen[0]):
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
