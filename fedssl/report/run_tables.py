"""What a page tells of every single run: how it stands and what repeats it, and every setting in which runs differ."""

from collections.abc import Sequence

from fedssl.report.text_table import Entry, Grid, entry
from fedssl.runs.run import Run

LEFT_OUT = ("output_dir", "resume", "run_id")  # of every run another one
_TARGET = "._target_"


def states(runs: Sequence[Run]) -> Grid:
    """A row for each run: folder, state, rounds done, seed, the command that repeats it, and why it did not finish."""
    rows = [
        [
            Entry(str(run.folder)),
            Entry(run.state),
            Entry(run.progress, run.rounds_done),
            entry(run.seed),
            Entry(run.command),
            Entry("" if run.finished or run.running else run.ending),
        ]
        for run in runs
    ]
    header = ["run", "state", "rounds", "seed", "command that repeats it", "why it did not finish"]
    return Grid("Runs", header, rows, left=len(header))


def differences(runs: Sequence[Run]) -> Grid:
    """Every setting in which runs differ, a column for each; with more settings than runs a column for each run.

    What a run does not have is empty, which is no difference where nothing but its words is known. A class is left out
    where the choice that stands for it differs as well.
    """
    settings = [run.every_setting for run in runs]
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
    body = [[Entry(first), *map(entry, others)] for first, *others in (rows if differ else [])]
    return Grid("Settings in which runs differ", header, body, left=len(header))
