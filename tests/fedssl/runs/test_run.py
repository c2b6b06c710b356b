"""Run folders: who holds them."""

import fcntl
from pathlib import Path
from typing import TextIO

from fedssl.runs.run import acquire_lock, is_locked


def locked(folder: Path) -> TextIO:
    lock = (folder / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_a_folder_is_held_until_its_holder_lets_go(tmp_path: Path):
    assert not is_locked(tmp_path)
    lock = acquire_lock(tmp_path)
    assert is_locked(tmp_path)
    assert acquire_lock(tmp_path) is None
    lock.close()
    assert not is_locked(tmp_path)
    assert acquire_lock(tmp_path / "missing") is None
    (tmp_path / "other" / ".lock").mkdir(parents=True)  # no file
    assert not is_locked(tmp_path / "other")
