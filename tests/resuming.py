"""A finished run, continued once more from one of its rounds: it must end with the same bits."""

import shutil
from pathlib import Path

from simulation.run import run


def repeat_from(round: int, run_folder: Path, *overrides: str) -> Path:
    """Copy the run, delete checkpoints and client states after the round, resume; return the copy's folder."""
    copy = run_folder.with_name("again")
    shutil.copytree(run_folder, copy)
    later = [file for file in copy.rglob("round-*") if int(file.name[6:12]) > round]
    assert any(file.parent.name == "checkpoints" for file in later)
    for file in later:
        file.unlink()
    run([f"resume={copy}", *overrides])
    return copy
