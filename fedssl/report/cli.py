"""The command ``fedssl-report``: results of any runs as a table, and figures.

    fedssl-report DIR... [--paper PAPER.TABLE] [--reference KEY=VALUE] [--metrics NAME...] [--figures [NAME...]]
        [--into FOLDER] [--out FILE] [--watch SECONDS]

A folder is a run folder or contains some (``multirun/...``, ``runs``). Runs that differ only in their seed make one
row, with mean and standard deviation; unfinished runs are listed with the reason. ``--figures`` writes the given
figures, or all that a run has data for, to its ``figures/`` as PNG, PDF and CSV, also while it is running; figures of
several runs are written to ``FOLDER/figures/``. ``--metrics`` selects results in tables and in figures of several
runs. If some figures cannot be written, all others are, and the exit status is 2. ``--paper`` compares the runs with a
table of a paper (`fedssl.report.paper_table`), ``--reference strategy=fedavg`` with the runs that have this choice
instead, paired by seed (`fedssl.report.paired_table`). ``--out`` writes the tables to FILE.md or FILE.tex, the results
to FILE.csv and the costs to FILE_costs.csv, or a page to FILE.html (`fedssl.report.html_page`); ``--watch`` repeats
this until all runs have ended, and then writes the figures.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedssl.atomic_files import write_text
from fedssl.command_line import run_command
from fedssl.config.literal import user_path
from fedssl.errors import InputError, sanitize
from fedssl.report.accuracy_table import run_results
from fedssl.report.cost_table import cost_table
from fedssl.report.paired_table import paired_table
from fedssl.report.paper_table import paper_table, read_table
from fedssl.runs.run import Run, find_runs, is_locked, run_folders
from fedssl.text_table import TextTable

FORMATS = (".md", ".csv", ".tex", ".html")
MAX_LISTED = 5  # runs in a message


def main() -> int:
    """Run the command and return its exit status, see `run_command`."""
    options = _parser().parse_intermixed_args()
    return run_command("fedssl-report", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if not options.folders:
        raise InputError("no folder is given; use fedssl-report DIR..., with --figures and --metrics after the folders")
    if options.into and options.figures is None:
        raise InputError(f"--into {options.into} requires --figures NAME...; add it, or remove --into")
    if options.metrics and options.paper:
        raise InputError("--metrics and --paper exclude each other: a paper has its own metrics; remove one of them")
    if options.reference and (options.paper or options.watch is not None):
        raise InputError("--reference compares runs that have ended; remove --paper and --watch")
    steps = [report]
    if options.figures is not None:
        check_figures(options)
        steps.insert(0 if options.watch is None else 1, figures)
    failures: list[str] = []
    for step in steps:
        try:
            step(options)
        except InputError as error:
            failures.append(str(error))
    if failures:
        raise InputError("; ".join(dict.fromkeys(failures)))


def check_figures(options: argparse.Namespace) -> None:
    """Raise an `InputError` if figures do not exist, or their folder does not."""
    from fedssl.plots.registry import PLOTS  # needs torch and matplotlib

    unknown = [name for name in options.figures if name not in PLOTS]
    if unknown:
        raise InputError(
            f"--figures {unknown[0]} does not exist; choose from {', '.join(PLOTS)} (folders come before --figures)"
        )
    folders, into = options.folders, options.into
    together = [name for name in options.figures if name in PLOTS and PLOTS[name].source == "runs"]
    if together and into is None and len(folders) > 1:
        raise InputError(f"the figure {together[0]} is of all {len(folders)} folders; add --into FOLDER")
    if into is not None and not into.is_dir():
        raise InputError(f"--into {into} is not a folder; create it, or choose another one")


def figures(options: argparse.Namespace) -> None:
    """Write figures of the runs in folders; those of several runs go to ``--into``, by default the only folder.

    An `InputError` has why some are missing.
    """
    # Imported here because they need torch and matplotlib.
    from fedssl.config.targets import expand_config_dir_flag
    from fedssl.plots.registry import write_plots

    failures = write_plots(
        select_metrics(find_runs(options.folders), options.metrics),
        options.figures,
        into=options.into or options.folders[0],
        overrides=expand_config_dir_flag([f"--config-dir={folder}" for folder in options.config_dir]),
        log=lambda text: print(sanitize(text), flush=True),
    )
    print()
    if failures:
        raise InputError("; ".join(failures))


def select_metrics(runs: Sequence[Run], metrics: Sequence[str] | None) -> Sequence[Run]:
    """Return the runs with only these results, None for all; `InputError` for one that none of the runs has."""
    if not metrics:
        return runs
    known = dict.fromkeys(name for run in runs for name in run.results)
    unknown = [name for name in metrics if known and name not in known]
    if unknown:
        raise InputError(f"--metrics {unknown[0]} is not a result of these runs; choose from {', '.join(known)}")
    return [replace(run, metrics=frozenset(metrics)) for run in runs]


def report(options: argparse.Namespace) -> None:
    """Print the tables of the runs in folders, or the comparison with a paper or a reference; write them to ``--out``.

    Repeat it every ``--watch`` seconds until all runs have ended.
    """
    folders, out, watch = options.folders, options.out, options.watch
    if options.paper is not None:
        read_table(options.paper)  # raises if it does not exist
    if out is not None and out.suffix not in FORMATS:
        raise InputError(f"--out {out} must end in one of {', '.join(FORMATS)}, e.g. --out results.md")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"--out {out}: the folder {out.parent} does not exist; create it, or choose another file")
    printed = ""
    written: dict[Path, None] = {}
    for runs, active in [(find_runs(folders), False)] if watch is None else watch_runs(folders, every=watch):
        if watch is None:
            _check_results(runs)
        runs = select_metrics(runs, options.metrics)
        tables = _tables(runs, options.paper, options.reference)
        text = "\n\n".join(table.text() for table in tables)
        if text != printed:
            print(f"\n{text}" if printed else text, flush=True)
            printed = text
        if out is not None:
            for file, content in _files(out, runs, tables, again=watch if active else None).items():
                _write(file, content)
                written[file] = None
    if out is not None:
        print(f"\nwritten to {' and '.join(map(str, written))}")


def _check_results(runs: Sequence[Run]) -> None:
    if not any(run.finished for run in runs):
        listed = "; ".join(f"{run.folder}: {run.failure_reason}" for run in runs[:MAX_LISTED])
        more = f"; and {len(runs) - MAX_LISTED} more" if len(runs) > MAX_LISTED else ""
        hint = "wait with --watch 30" if any(run.running for run in runs) else "try fedssl resume=FOLDER"
        raise InputError(f"no run has finished, so there are no results ({listed}{more}); {hint}")


def _tables(runs: Sequence[Run], paper: str | None, reference: str | None) -> list[TextTable]:
    if paper is not None:
        return [paper_table(paper, runs)]
    if reference is not None:
        return [paired_table(runs, reference)]
    costs = cost_table(runs)
    return [run_results(runs).table(), *([costs] if costs.rows else [])]


def _files(out: Path, runs: Sequence[Run], tables: Sequence[TextTable], *, again: float | None) -> dict[Path, str]:
    """Return the content of each file; a CSV file has one table."""
    if out.suffix == ".html":
        from fedssl.report.html_page import page  # needs matplotlib

        return {out: page(runs, tables, again=again)}
    if out.suffix == ".csv":
        names = [out, out.with_stem(f"{out.stem}_costs")]
        return {file: table.csv() for file, table in zip(names, tables, strict=False)}  # there may be no costs
    return {out: "\n".join(table.latex() if out.suffix == ".tex" else table.markdown() for table in tables)}


def _write(file: Path, text: str) -> None:
    try:
        write_text(file, text)
    except OSError as error:
        raise InputError(f"--out {file} cannot be written ({error.strerror}); choose another file") from error


def watch_runs(folders: Sequence[Path], *, every: float) -> Iterator[tuple[Sequence[Run], bool]]:
    """Yield the runs in folders at intervals of ``every`` seconds, at least 1, and once more when all have ended.

    Folders without a run are waited for. The flag is whether a process works on one of the runs, or on a sweep that
    they belong to.
    """
    if not (math.isfinite(every) and every >= 1):
        raise InputError(f"--watch {every:g} must be at least 1 second, e.g. --watch 30")
    missing: list[Path] = []
    active = True
    while active:
        waiting = [folder for folder in folders if folder.is_dir() and not run_folders(folder)]
        if waiting and waiting != missing:
            print(f"waiting for a run in {', '.join(map(str, waiting))}", flush=True)
        missing = waiting
        runs = find_runs(folder for folder in folders if folder not in waiting)
        sweeps = {*folders, *(run.folder.parent for run in runs)}
        active = bool(waiting) or any(run.running for run in runs) or any(map(is_locked, sweeps))
        if not active:
            runs = find_runs(folders)  # with what was written in between
        if runs:
            yield runs, active
        if active:
            time.sleep(every)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedssl-report", description="Results of any runs as a table, and figures.", allow_abbrev=False
    )
    add = parser.add_argument
    add("folders", metavar="DIR", type=user_path, nargs="*", help="run folder, or folder that contains some")
    only = "only these results in tables and in figures of all runs, e.g. linear knn (default: all)"
    add("--metrics", metavar="NAME", nargs="+", help=only)
    figures = (
        "write these figures, or all that a run has data for (some seconds each), to its figures/: partition, "
        "metrics, cosines, spectrum, tsne, sphere, cka; landscape, cka_layers, forgetting of runs with snapshot_every; "
        "accuracy, divergence, tradeoff, sensitivity, heatmap, critical_difference of all runs"
    )
    add("--figures", metavar="NAME", nargs="*", help=figures)
    add("--into", metavar="FOLDER", type=user_path, help="write figures of all runs to its figures/")
    own = "folder with your own settings, for figures of models"
    add("--config-dir", metavar="FOLDER", type=user_path, action="append", default=[], help=own)
    add("--paper", metavar="PAPER.TABLE", help="compare with a table of a paper, e.g. l_dawa.table2")
    add("--reference", metavar="KEY=VALUE", help="differences from this choice by seed, e.g. strategy=fedavg")
    out = (
        "write the tables to FILE.md or FILE.tex, the results to FILE.csv and the costs to FILE_costs.csv, or a "
        "page with figures to FILE.html"
    )
    add("--out", metavar="FILE", type=user_path, help=out)
    add("--watch", metavar="SECONDS", type=float, help="repeat until all runs have ended")
    return parser
