"""Runs and sweeps that go on, looked at again and again until they have ended."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedssl.errors import InputError
from fedssl.runs.run import Run, find_runs, is_locked


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
