"""What a page tells of every single run: how it stands and what repeats it, and every setting in which runs differ."""

from collections.abc import Sequence

from fedssl.report.text_table import TableCell, TableData, text_cell
from fedssl.runs.run import Run

LEFT_OUT = ("output_dir", "resume", "run_id")  # of every run another one
_TARGET = "._target_"


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
    keys = dict.fromkeys(key for one in settings for key in one if key not in LEFT_OUT)
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
