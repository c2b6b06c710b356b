"""The command ``fedssl-report``: the results of any runs as one table, and figures of each of them.

    fedssl-report DIR... [--paper PAPER.TABLE] [--figures] [--out FILE.md|FILE.csv]

A folder is that of a run, or has runs below it (``multirun/...``, ``runs``). Runs that differ only in their seed make
one row, with mean and standard deviation; runs that did not finish are listed with the reason. ``--figures`` draws
what a run folder has numbers for into its ``figures/``, also while the run goes on. ``--paper`` sets the runs beside
the numbers of a table of a paper (`fedssl.report.paper_table`).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedssl.errors import InputError
from fedssl.files import write_text
from fedssl.report.accuracy_table import Table, run_table
from fedssl.report.cost_table import CostTable, cost_table
from fedssl.report.paper_numbers import read_table
from fedssl.report.paper_table import PaperTable, paper_table
from fedssl.report.runs import Run, find_runs
from fedssl.untrusted import printable

FORMATS = (".md", ".csv")
LISTED = 5  # runs that a message names


def main() -> int:
    """Entry point; returns the exit status, 2 for what the user has to put right."""
    options = _parser().parse_args()
    try:
        if options.pictures:
            raise InputError("--pictures is called --figures now; write fedssl-report DIR... --figures")
        report(options.folders, figures=options.figures, out=options.out, paper=options.paper)
        sys.stdout.flush()
    except InputError as error:
        print(f"fedssl-report: {printable(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `fedssl-report ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def report(folders: Sequence[Path], *, figures: bool, out: Path | None, paper: str | None = None) -> None:
    """Print the tables of the runs in the folders, or a paper's with them, write them to ``out``, and draw the figures.

    Raises
    ------
    InputError
        A folder has no run in it, no run has finished, there is no such table, or ``out`` cannot be written.
    """
    if paper is not None:
        read_table(paper)  # is there one?
    if out is not None and out.suffix not in FORMATS:
        raise InputError(f"--out {out} ends in neither of {', '.join(FORMATS)}; choose one, e.g. --out results.md")
    runs = find_runs(folders)
    if figures:
        _draw(runs)
    if not any(run.finished for run in runs):
        listed = "; ".join(f"{run.folder}: {run.ending}" for run in runs[:LISTED])
        more = f"; and {len(runs) - LISTED} more" if len(runs) > LISTED else ""
        raise InputError(f"no run has finished, so there are no results ({listed}{more}); try fedssl resume=FOLDER")
    tables: list[Table | CostTable | PaperTable]
    if paper is None:
        costs = cost_table(runs)
        tables = [run_table(runs), *([costs] if costs.rows else [])]
    else:
        tables = [paper_table(paper, runs)]
    print("\n\n".join(table.text() for table in tables))
    if out is not None:
        kinds = {".md": [table.markdown() for table in tables], ".csv": [table.csv() for table in tables]}
        _write(out, "\n".join(kinds[out.suffix]))
        print(f"\nwritten to {out}")


def _draw(runs: Sequence[Run]) -> None:
    # Imported here: they need torch and matplotlib, which the tables do not.
    from fedssl.report.curves import draw_curves
    from fedssl.report.embeddings import draw_embeddings

    for run in runs:
        drawn = [*draw_curves(run.folder), *draw_embeddings(run.folder)]
        names = ", ".join(file.name for file in drawn)
        told = f"{run.folder / 'figures'}: {names}" if drawn else f"{run.folder}: nothing to draw"
        print(printable(told), flush=True)
    print()


def _write(file: Path, text: str) -> None:
    try:
        write_text(file, text)
    except OSError as error:
        raise InputError(f"--out {file} cannot be written ({error.strerror}); choose another place") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedssl-report", description="The results of any runs as one table, and figures of each of them."
    )
    parser.add_argument(
        "folders", metavar="DIR", type=Path, nargs="+", help="folder of a run, or folder with runs below it"
    )
    parser.add_argument(
        "--figures",
        action="store_true",
        help="draw curves, spectra, t-SNE and sphere of every run into its figures/ (takes some seconds each)",
    )
    parser.add_argument(
        "--paper", metavar="PAPER.TABLE", help="set the runs beside this table of a paper, e.g. l_dawa.table2"
    )
    parser.add_argument("--pictures", action="store_true", help=argparse.SUPPRESS)  # the old name of --figures
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the table to FILE.md or FILE.csv as well")
    return parser
