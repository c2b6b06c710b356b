"""The command ``fedssl-report``: the results of any runs as one table, and figures of each of them.

    fedssl-report DIR... [--paper PAPER.TABLE] [--figures [NAME...]] [--into FOLDER] [--out FILE] [--watch SECONDS]

A folder is that of a run, or has runs below it (``multirun/...``, ``runs``). Runs that differ only in their seed make
one row, with mean and standard deviation; runs that did not finish are listed with the reason. ``--figures`` draws
what a run folder has numbers for into its ``figures/``, also while the run goes on, or the figures that it names, each
as PNG, PDF and CSV; those of several runs together go into ``FOLDER/figures/``. ``--paper`` sets the runs beside the
numbers of a table of a paper (`fedssl.report.paper_table`). ``--out`` writes the tables to FILE.md, FILE.csv or
FILE.tex, or all of it as one page, FILE.html (`fedssl.report.html_page`); ``--watch`` does so again until all runs
have ended.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedssl.atomic_files import write_text
from fedssl.command_line import run_command
from fedssl.errors import InputError
from fedssl.report.accuracy_table import run_table
from fedssl.report.cost_table import cost_table
from fedssl.report.paper_table import paper_table, read_table
from fedssl.runs.run import Run, find_runs, is_locked
from fedssl.text_table import TextTable
from fedssl.untrusted import sanitize

FORMATS = (".md", ".csv", ".tex", ".html")
MAX_LISTED = 5  # runs that a message names


def main() -> int:
    """Entry point; returns the exit status, see `run_command`."""
    options = _parser().parse_args()
    return run_command("fedssl-report", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if options.pictures:
        raise InputError("--pictures is called --figures now; write fedssl-report DIR... --figures")
    if not options.folders:
        raise InputError("no folder is given; write fedssl-report DIR... and --figures behind the folders")
    if options.into and options.figures is None:
        raise InputError(f"--into {options.into} is for --figures NAME...; add it, or leave --into out")
    if options.figures is not None:
        figures(options.folders, options.figures, into=options.into, settings=options.config_dir)
    report(options.folders, out=options.out, paper=options.paper, watch=options.watch)


def figures(folders: Sequence[Path], names: Sequence[str], *, into: Path | None, settings: Sequence[Path]) -> None:
    """Draw figures of the runs in the folders.

    Parameters
    ----------
    folders : sequence of Path
    names : sequence of str
        Which ones; none: those of what every run writes.
    into : Path or None
        Where figures of several runs together go; None: into the folder, if there is one alone.
    settings : sequence of Path
        Folders of settings of the user's own that the runs were made with.

    Raises
    ------
    InputError
        A folder has no run in it, there is no such figure, a run lacks what it needs, or it is not said where to.
    """
    # Imported here: they need torch and matplotlib, which the tables do not.
    from fedssl.config.targets import expand_config_dir_flag
    from fedssl.plots.registry import PLOTS, write_plots

    together = [name for name in names if name in PLOTS and PLOTS[name].source == "runs"]
    if together and into is None and len(folders) > 1:
        raise InputError(f"the figure {together[0]} is of all {len(folders)} folders; say where to with --into FOLDER")
    overrides = expand_config_dir_flag([f"--config-dir={folder}" for folder in settings])
    if into is not None and not into.is_dir():
        raise InputError(f"--into {into} is no folder; make it, or name another one")
    write_plots(
        find_runs(folders),
        names,
        into=into or folders[0],
        overrides=overrides,
        log=lambda text: print(sanitize(text), flush=True),
    )
    print()


def report(folders: Sequence[Path], *, out: Path | None, paper: str | None = None, watch: float | None = None) -> None:
    """Print the tables of the runs in the folders, or a paper's with them, and write them to ``out``.

    With ``watch`` again every so many seconds, until all runs have ended; without, at least one must have finished.

    Raises
    ------
    InputError
        A folder has no run in it, no run has finished, there is no such table, or ``out`` cannot be written.
    """
    if paper is not None:
        read_table(paper)  # is there one?
    if out is not None and out.suffix not in FORMATS:
        raise InputError(f"--out {out} ends in none of {', '.join(FORMATS)}; choose one, e.g. --out results.md")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"--out {out} lies in no folder; make {out.parent} first, or name another place")
    printed = ""

    def show(runs: Sequence[Run], on: bool) -> None:
        nonlocal printed
        tables = _tables(runs, paper)
        shown = "\n\n".join(table.text() for table in tables)
        if shown != printed:
            print(f"\n{shown}" if printed else shown, flush=True)
            printed = shown
        if out is not None:
            _write(out, _in_form(out.suffix, runs, tables, again=watch if on else None))

    if watch is not None:
        watch_runs(folders, every=watch, show=show)
    else:
        runs = find_runs(folders)
        _check_results(runs)
        show(runs, False)
    if out is not None:
        print(f"\nwritten to {out}")


def _check_results(runs: Sequence[Run]) -> None:
    if not any(run.finished for run in runs):
        listed = "; ".join(f"{run.folder}: {run.failure_reason}" for run in runs[:MAX_LISTED])
        more = f"; and {len(runs) - MAX_LISTED} more" if len(runs) > MAX_LISTED else ""
        hint = "wait with --watch 30" if any(run.running for run in runs) else "try fedssl resume=FOLDER"
        raise InputError(f"no run has finished, so there are no results ({listed}{more}); {hint}")


def _tables(runs: Sequence[Run], paper: str | None) -> list[TextTable]:
    if paper is not None:
        return [paper_table(paper, runs)]
    costs = cost_table(runs)
    return [run_table(runs), *([costs] if costs.rows else [])]


def _in_form(suffix: str, runs: Sequence[Run], tables: Sequence[TextTable], *, again: float | None) -> str:
    """The content of a file of one of the `FORMATS`."""
    if suffix == ".html":
        from fedssl.report.html_page import page  # it needs matplotlib, which the tables do not

        return page(runs, tables, again=again)
    if suffix == ".tex":
        return "\n".join(table.latex() for table in tables)
    return "\n".join(table.markdown() if suffix == ".md" else table.csv() for table in tables)


def _write(file: Path, text: str) -> None:
    try:
        write_text(file, text)
    except OSError as error:
        raise InputError(f"--out {file} cannot be written ({error.strerror}); choose another place") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedssl-report",
        description="The results of any runs as one table, and figures of each of them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folders", metavar="DIR", type=Path, nargs="*", help="folder of a run, or folder with runs below it"
    )
    parser.add_argument(
        "--figures",
        metavar="NAME",
        nargs="*",
        help="draw into the figures/ of every run what it has numbers for (takes some seconds each), or these figures: "
        "partition, metrics, cosines, spectrum, tsne, sphere, cka; landscape, cka_layers, forgetting of runs with "
        "snapshot_every; accuracy, divergence, sensitivity of all runs together",
    )
    parser.add_argument(
        "--into", metavar="FOLDER", type=Path, help="where figures of all runs together go, into its figures/"
    )
    parser.add_argument(
        "--config-dir",
        metavar="FOLDER",
        type=Path,
        action="append",
        default=[],
        help="settings of your own that the runs were made with, where figures look into models",
    )
    parser.add_argument(
        "--paper", metavar="PAPER.TABLE", help="set the runs beside this table of a paper, e.g. l_dawa.table2"
    )
    parser.add_argument("--pictures", action="store_true", help=argparse.SUPPRESS)  # the old name of --figures
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the tables to FILE.md, FILE.csv or FILE.tex as well, or a page with figures to FILE.html",
    )
    parser.add_argument(
        "--watch", metavar="SECONDS", type=float, help="do so every so many seconds until all runs have ended"
    )
    return parser


def watch_runs(folders: Sequence[Path], *, every: float, show: Callable[[Sequence[Run], bool], None]) -> None:
    """Show the runs in the folders every so many seconds, for the last time when none goes on any more.

    Parameters
    ----------
    folders : sequence of Path
    every : float
        Seconds, 1 or more.
    show : callable
        Takes the runs, and whether they will be shown again.

    Raises
    ------
    InputError
        The number of seconds is none, or there is no run in a folder.
    """
    if not (math.isfinite(every) and every >= 1):
        raise InputError(f"--watch {every:g} is no time to wait; give seconds, 1 or more, e.g. --watch 30")
    while True:
        runs = find_runs(folders)
        on = is_active(folders, runs)
        if not on:
            runs = find_runs(folders)  # with what was written in between
        show(runs, on)
        if not on:
            return
        time.sleep(every)


def is_active(folders: Sequence[Path], runs: Sequence[Run]) -> bool:
    """Whether a process is at work on one of the runs, or on a sweep that they belong to."""
    sweeps = {*folders, *(run.folder.parent for run in runs)}
    return any(run.running for run in runs) or any(map(is_locked, sweeps))
