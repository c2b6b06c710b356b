"""The command ``fedssl-runs``: list, rank, show and verify runs.

    fedssl-runs list [DIR...] [KEY=VALUE...] [--json]          all runs, newest first
    fedssl-runs best METRIC [DIR...] [KEY=VALUE...] [--seeds]  finished runs by a final result, the best first
    fedssl-runs best --by rankme|alpha_req|lidar [DIR...] ...  the same by a result that needs no labels
    fedssl-runs show DIR [--json]                              settings, results, command and files of a run
    fedssl-runs verify DIR [--json]                            damaged and missing files of a run; exit status 1 if any

Folders are run folders or contain some; the default is ``runs`` and ``multirun``. Filters select runs by settings,
choices, and ``status``. ``best`` shows mean and standard deviation over runs that differ only in their seed; with
``--seeds`` each run.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedssl.command_line import run_command
from fedssl.config.commands import parse_arguments
from fedssl.config.literal import user_path
from fedssl.config.saved_run import resume_command
from fedssl.errors import InputError, sanitize
from fedssl.evaluation.scores import column_title, to_flat_dict, units_of
from fedssl.runs.catalog import (
    DEFAULT_FOLDERS,
    RankedRuns,
    differences_from_defaults,
    filter_runs,
    rank_runs,
    read_listed,
    readable_runs,
)
from fedssl.runs.groups import IGNORED, MAIN, compared_settings, varying
from fedssl.runs.run import LABEL_FREE, RUN_MARKERS, Run
from fedssl.runs.verify import verify_run
from fedssl.text_table import align

_COLUMNS = ("strategy", "method", "partition", "partition.alpha", "num_clients")
_HEADS = ("strategy", "method", "partition", "alpha", "K")


def main() -> int:
    """Run the command, and return its exit status, see `run_command`."""
    options = _options()
    if options.command == "verify":
        return run_command("fedssl-runs", lambda: verify(options))
    command = {"list": list_runs, "best": best_runs, "show": show_run}[options.command]
    return run_command("fedssl-runs", lambda: print(command(options)))


def list_runs(options: argparse.Namespace) -> str:
    """Return the table of the selected runs."""
    runs, problems = _selected(options.overrides)
    if options.json:
        return _json({"runs": [*map(_plain, runs)], "unreadable": problems})
    if not runs:
        return "\n".join(["no run matches the filters", *map(sanitize, problems)])
    head = ("date", "run", "status", "rounds", *_HEADS, "results")
    return _table(head, [*map(_cells, runs)], problems)


def best_runs(options: argparse.Namespace) -> str:
    """Return the table of finished runs by a result."""
    from fedssl.runs.reliability import reliability  # imports SciPy, which is slow

    metric, overrides = options.metric, options.overrides
    if options.by is not None and options.by not in LABEL_FREE:
        raise InputError(
            f"--by {options.by} is none of {', '.join(LABEL_FREE)}, which need no labels; choose one of them, or write "
            "`fedssl-runs best METRIC` for another result"
        )
    if options.by is not None:  # the first argument is no metric
        metric, overrides = options.by, [*filter(None, [options.metric]), *overrides]
    if metric is None:
        raise InputError(f"the metric is missing; write `fedssl-runs best knn`, or --by {'|'.join(LABEL_FREE)}")
    runs, problems = _selected(overrides)
    ranked = rank_runs(runs, metric, each=options.seeds)
    reliable = reliability(runs, metric) if metric in LABEL_FREE else None
    if options.json:
        groups = [{**to_flat_dict({metric: each.score}), "runs": [*map(_plain, each.runs)]} for each in ranked]
        about = {"metric": metric, "unit": ranked[0].score.unit, "ranked": groups, "unreadable": problems}
        return _json(about | ({"reliability": reliable} if reliable else {}))
    differing = _differing(ranked)
    head = ("", column_title(metric, ranked[0].score.unit), "runs", "rounds", *_HEADS, *differing, "best run")
    rows: list[Sequence[str]] = []
    for rank, group in enumerate(ranked, start=1):
        best = group.runs[0]
        values = [best.value(key) for key in (*_COLUMNS, *differing)]
        rows.append(
            (str(rank), group.score.number, str(len(group.runs)), str(best.rounds_done), *values, str(best.folder))
        )
    return _table(head, rows, [*filter(None, [reliable]), *problems])


def show_run(options: argparse.Namespace) -> str:
    """Return the settings that differ from the defaults, the results, the command and the files of a run."""
    folder: Path = options.folder
    if not any((folder / mark).is_file() for mark in RUN_MARKERS):
        raise InputError(f"{folder} is not a run folder; `fedssl-runs list` shows all runs")
    run = read_listed(folder)
    differing = differences_from_defaults(run)
    summary = run.summary or {}
    files = {file.relative_to(folder): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    sizes = {str(file): size for file, size in files.items() if "clients" not in file.parts}
    if options.json:
        values = {key: {"value": value, "default": default} for key, (value, default) in differing.items()}
        rest = {"differs": values, "final": summary.get("final"), "command": run.command, "files": sizes}
        return _json(_plain(run) | rest)
    parts = [f"{run.folder}\n{run.date}  {run.state} after {run.rounds_done} rounds"]
    reason = summary.get("reason") or (None if run.finished else run.failure_reason)
    parts[0] += f"  ({reason})" if reason else ""
    table = [
        ("setting", "value", "default"),
        *((key, _text(value), _text(default)) for key, (value, default) in differing.items()),
    ]
    parts.append(align(table, left=3) if differing else "all settings are the defaults")
    scores = [(name, score.text) for name, score in run.latest_results.items()]
    title = "result" if run.finished else "latest result"
    parts.append(align([(title, ""), *scores], left=1) if scores else "no results")
    parts.append(f"repeat it:  {run.command if summary else resume_command(folder)}")
    parts.append(align([("file", "bytes"), *((name, f"{size:,}") for name, size in sizes.items())], left=1))
    return "\n\n".join(sanitize(part, lines=True) for part in parts)


def verify(options: argparse.Namespace) -> int:
    """Print what is wrong with a run folder and what can be recovered; return 1 if anything is wrong."""
    result = verify_run(options.folder)
    if options.json:
        print(_json({"problems": result.problems, "intact_checkpoints": result.intact}))
    elif result.problems:
        print(sanitize("\n".join([*result.problems, result.recovery]), lines=True))
    else:
        print(f"{sanitize(options.folder)} is complete; {result.recovery}")
    return int(bool(result.problems))


def _selected(arguments: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Select runs by folders and filters in any order; an argument that exists is a folder."""
    overrides = [argument for argument in arguments if "=" in argument and not user_path(argument).exists()]
    folders = [user_path(argument) for argument in arguments if argument not in overrides]
    folders = folders or [folder for folder in DEFAULT_FOLDERS if folder.is_dir()]
    if not folders:
        raise InputError("there is neither runs nor multirun here; give folders of runs or of sweeps")
    runs, problems = readable_runs(folders)
    return filter_runs(runs, overrides), problems


def _cells(run: Run) -> tuple[str, ...]:
    rounds = f"{run.rounds_done}/{run.value('rounds') or '?'}"
    results = "  ".join(f"{name} {score.text}" for name, score in run.latest_results.items())
    return (run.date, str(run.folder), run.state, rounds, *map(run.value, _COLUMNS), results)


def _differing(ranked: Iterable[RankedRuns]) -> list[str]:
    """Return the overridden settings that differ, besides those that are always shown."""
    runs = [group.runs[0] for group in ranked]
    settings_of = compared_settings(runs, always=MAIN, ignored={*IGNORED, "experiment"})
    return [key for key in varying([settings_of(run) for run in runs]) if key not in (*_COLUMNS, "rounds")]


def _plain(run: Run) -> dict[str, Any]:
    """Return a run as plain values: accuracies in [0, 1], in full precision."""
    return {
        "folder": str(run.folder),
        "date": run.date,
        "status": run.state,
        "rounds": run.rounds_done,
        "seed": run.seed,
        "choices": run.choices,
        **{key: run.value(key) for key in _COLUMNS},
        "results": to_flat_dict(run.latest_results),
        "units": units_of(run.latest_results),
    }


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], problems: Iterable[str]) -> str:
    """Return a table without empty columns, and the problems below it."""
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    lines = list(zip(*columns, strict=True))
    return "\n".join([align(lines, left=len(lines[0])), *map(sanitize, problems)])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, default=str)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fedssl-runs", description="List, rank, show and verify runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="all runs, newest first")
    ranking = commands.add_parser("best", help="finished runs by a final result, the best first")
    ranking.add_argument("metric", metavar="METRIC", nargs="?", help="a final result, e.g. knn; none with --by")
    ranking.add_argument("--by", metavar="|".join(LABEL_FREE), help="rank by a result that needs no labels")
    ranking.add_argument("--seeds", action="store_true", help="one row per run instead of one for all seeds")
    for command in (listing, ranking):
        command.add_argument(
            "overrides", metavar="DIR|KEY=VALUE", nargs="*", help="folders (default: runs and multirun) and filters"
        )
    showing = commands.add_parser("show", help="settings, results, command and files of a run")
    verifying = commands.add_parser("verify", help="damaged and missing files of a run")
    for command in (showing, verifying):
        command.add_argument("folder", metavar="DIR", type=user_path, help="run folder")
    for command in (listing, ranking, showing, verifying):
        command.add_argument("--json", action="store_true", help="for scripts")
    return parse_arguments(commands.choices, parser)
