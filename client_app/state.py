"""What a client keeps between rounds: files on its own disk, one version per round it took part in.

Versions make a resumed run exact: a run that goes back to round r finds what each client had kept before round r + 1,
whatever the client wrote later.
"""

import logging
from pathlib import Path

import torch

from fedssl.files import numbered_file, numbered_files, write_whole
from strategies.base import State

log = logging.getLogger("fedssl")


def load_state(folder: Path, *, before: int) -> State | None:
    """The state of the last round before round ``before``; None if the client kept nothing until then."""
    for round in reversed(numbered_files(folder)):
        if round < before:
            try:
                state: State = torch.load(numbered_file(folder, round), weights_only=True)
            except Exception as error:  # there is no end to how reading a damaged file can fail
                log.warning(
                    "%s is damaged (%s); trying the one before", numbered_file(folder, round), type(error).__name__
                )
            else:
                return state
    return None


def save_state(folder: Path, state: State, *, round: int, keep_from: int) -> None:
    """Write the state after ``round``, all of it or nothing, and drop versions that no resumed run can ask for.

    Parameters
    ----------
    keep_from : int
        Oldest round that a resumed run may go back to: the newest version up to it stays, older ones go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(numbered_file(folder, round), lambda partial: torch.save(state, partial))
    reachable = [version for version in numbered_files(folder) if version <= keep_from]
    for version in reachable[:-1]:
        numbered_file(folder, version).unlink(missing_ok=True)
