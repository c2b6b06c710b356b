"""The command ``fedssl-runs``: which runs there are, which are best, and what one was.

    fedssl-runs list [DIR...] [KEY=VALUE...] [--json]          all runs, newest first
    fedssl-runs best METRIC [DIR...] [KEY=VALUE...] [--seeds]  finished runs by a final result, the largest first
    fedssl-runs show DIR [--json]                              one run: what was set, what came out, what repeats it

Folders are those of runs, or have runs below them; without any, ``runs`` and ``multirun``. Words keep the runs that
agree with them: settings, choices, and ``status``. ``best`` takes runs that differ in nothing but the seed for one,
with mean and standard deviation; with ``--seeds`` every run stands for itself.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedssl.command_line import run_command
from fedssl.errors import InputError
from fedssl.evaluation.scores import column_title, to_flat_dict, units_of
from fedssl.runs.catalog import (
    DEFAULT_FOLDERS,
    RankedRuns,
    RunEntry,
    differences_from_defaults,
    filter_entries,
    find_entries,
    rank_runs,
    read_entry,
)
from fedssl.runs.groups import IGNORED, compared_settings, varying
from fedssl.runs.run import RUN_MARKERS
from fedssl.text_table import align
from fedssl.untrusted import sanitize

_COLUMNS = ("strategy", "method", "partition", "partition.alpha", "num_clients")
_HEADS = ("strategy", "method", "partition", "alpha", "K")


def main() -> int:
    """Entry point; returns the exit status, see `run_command`."""
    options = _parser().parse_args()
    command = {"list": list_runs, "best": best_runs, "show": show_run}[options.command]
    return run_command("fedssl-runs", lambda: print(command(options)))


def list_runs(options: argparse.Namespace) -> str:
    """Make the list of the runs that the words keep."""
    entries, problems = _entries(options.overrides)
    if options.json:
        return _json({"runs": [_plain(entry) for entry in entries], "unreadable": problems})
    if not entries:
        return "\n".join(["no run agrees with that", *map(sanitize, problems)])
    head = ("date", "run", "status", "rounds", *_HEADS, "results")
    return _table(head, [_cells(entry) for entry in entries], problems)


def best_runs(options: argparse.Namespace) -> str:
    """Make the list of finished runs by a result."""
    entries, problems = _entries(options.overrides)
    ranked = rank_runs(entries, options.metric, each=options.seeds)
    if options.json:
        told = [{**to_flat_dict({options.metric: one.score}), "runs": [*map(_plain, one.entries)]} for one in ranked]
        return _json({"metric": options.metric, "unit": ranked[0].score.unit, "ranked": told, "unreadable": problems})
    differing = _differing(ranked)
    head = ("", column_title(options.metric, ranked[0].score.unit), "runs", "rounds", *_HEADS, *differing, "best run")
    rows: list[Sequence[str]] = []
    for place, one in enumerate(ranked, start=1):
        first = one.entries[0]
        values = [first.run.value(key) for key in (*_COLUMNS, *differing)]
        rows.append((str(place), one.score.number, str(len(one.entries)), str(first.done), *values, first.name))
    return _table(head, rows, problems)


def show_run(options: argparse.Namespace) -> str:
    """Tell of a run what was set, what came out, what repeats it, and which files there are."""
    folder: Path = options.folder
    if not any((folder / mark).is_file() for mark in RUN_MARKERS):
        raise InputError(f"{folder} is no folder of a run; `fedssl-runs list` shows the runs that there are")
    entry = read_entry(folder)
    differing = differences_from_defaults(entry.run)
    summary = entry.run.summary or {}
    files = sorted(file for file in folder.rglob("*") if file.is_file() and "clients" not in file.parts)
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    if options.json:
        values = {key: {"value": one, "default": other} for key, (one, other) in differing.items()}
        rest = {"differs": values, "final": summary.get("final"), "command": summary.get("command"), "files": sizes}
        return _json(_plain(entry) | rest)
    parts = [f"{entry.name}\n{entry.date}  {entry.status} after {entry.done} rounds"]
    reason = summary.get("reason") or (None if entry.run.finished else entry.run.failure_reason)
    parts[0] += f"  ({reason})" if reason else ""
    table = [
        ("setting", "value", "default"),
        *((key, _text(one), _text(usual)) for key, (one, usual) in differing.items()),
    ]
    parts.append(align(table, left=3) if differing else "all settings are the defaults")
    scores = [(name, score.text) for name, score in entry.results.items()]
    title = "result" if entry.run.finished else "latest result"
    parts.append(align([(title, ""), *scores], left=1) if scores else "no results")
    parts.append(f"repeat it:  {summary.get('command') or f'fedssl resume={folder}'}")
    parts.append(align([("file", "bytes"), *((name, f"{size:,}") for name, size in sizes.items())], left=1))
    return "\n\n".join(sanitize(part, lines=True) for part in parts)


def _entries(arguments: Sequence[str]) -> tuple[list[RunEntry], list[str]]:
    """The runs that are asked for, by folders and words in any order; what exists is a folder."""
    folders = [Path(one) for one in arguments if "=" not in one or Path(one).exists()]
    overrides = [one for one in arguments if "=" in one and not Path(one).exists()]
    folders = folders or [folder for folder in DEFAULT_FOLDERS if folder.is_dir()]
    if not folders:
        raise InputError("there is neither runs nor multirun here; give folders of runs or of sweeps")
    entries, problems = find_entries(folders)
    return filter_entries(entries, overrides), problems


def _cells(entry: RunEntry) -> tuple[str, ...]:
    rounds = f"{entry.done}/{entry.run.value('rounds') or '?'}"
    results = "  ".join(f"{name} {score.text}" for name, score in entry.results.items())
    return (entry.date, entry.name, entry.status, rounds, *map(entry.run.value, _COLUMNS), results)


def _differing(ranked: Iterable[RankedRuns]) -> list[str]:
    """Settings that were given to some of them, and that they do not agree in, beside those that are always shown."""
    runs = [one.entries[0].run for one in ranked]
    settings_of = compared_settings(runs, ignored={*IGNORED, *_COLUMNS, "rounds", "experiment"})
    return varying([settings_of(run) for run in runs])


def _plain(entry: RunEntry) -> dict[str, Any]:
    """Tell an entry to scripts: accuracies in [0, 1], in full precision."""
    return {
        "folder": entry.name,
        "date": entry.date,
        "status": entry.status,
        "rounds": entry.done,
        "seed": entry.run.seed,
        "choices": entry.run.choices,
        **{key: entry.run.value(key) for key in _COLUMNS},
        "results": to_flat_dict(entry.results),
        "units": units_of(entry.results),
    }


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], problems: Iterable[str]) -> str:
    """Align columns without those that are empty, and put sentences below."""
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    lines = list(zip(*columns, strict=True))
    return "\n".join([align(lines, left=len(lines[0])), *map(sanitize, problems)])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, default=str)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedssl-runs", description="The runs that lie in folders.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="all runs, newest first")
    ranking = commands.add_parser("best", help="finished runs by a final result, the largest first")
    ranking.add_argument("metric", metavar="METRIC", help="a final result, e.g. knn")
    ranking.add_argument("--seeds", action="store_true", help="every run for itself, not one row for all seeds")
    for one in (listing, ranking):
        one.add_argument(
            "overrides",
            metavar="DIR|KEY=VALUE",
            nargs="*",
            help="folders (runs and multirun), and what runs agree with",
        )
    showing = commands.add_parser("show", help="one run: what was set, what came out, what repeats it")
    showing.add_argument("folder", metavar="DIR", type=Path, help="the folder of a run")
    for one in (listing, ranking, showing):
        one.add_argument("--json", action="store_true", help="for scripts")
    return parser
