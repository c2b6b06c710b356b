"""Run folders: who holds them, and which there are."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

import pytest

from fedssl.errors import InputError
from fedssl.runs.run import is_locked, run_folders
from simulation.sweep import acquire_lock


def locked(folder: Path) -> TextIO:
    lock = (folder / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_a_folder_is_held_until_its_holder_lets_go(tmp_path: Path):
    assert not is_locked(tmp_path)
    lock = acquire_lock(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(InputError, match="is in use by another process; wait for its end, or stop it"):
        acquire_lock(tmp_path)
    lock.close()
    assert not is_locked(tmp_path)
    assert acquire_lock(tmp_path / "missing") is None
    (tmp_path / "other" / ".lock").mkdir(parents=True)  # no file
    assert not is_locked(tmp_path / "other")


def test_links_to_runs_are_followed_once(tmp_path: Path):
    """A study on another disk, a second name of a run, and a link to a folder above."""
    runs, disk = tmp_path / "runs", tmp_path / "disk"
    for folder in (runs / "b", disk / "study" / "0", disk / "study" / "1"):
        folder.mkdir(parents=True)
        (folder / "summary.json").touch()
    (runs / "a_latest").symlink_to(runs / "b")
    (runs / "study").symlink_to(disk / "study")
    (disk / "study" / "above").symlink_to(runs)
    (runs / "broken").symlink_to(tmp_path / "nowhere")
    assert run_folders(runs) == [runs / "b", runs / "study" / "0", runs / "study" / "1"]


def test_folders_of_another_user_are_named(monkeypatch, tmp_path, caplog):
    (tmp_path / "open").mkdir()
    (tmp_path / "closed").mkdir()
    original = os.scandir

    def scandir(path):
        if str(path) in closed:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr("os.scandir", scandir)
    closed = {str(tmp_path / "closed")}
    assert run_folders(tmp_path) == []
    assert f"{tmp_path / 'closed'} is left out (Permission denied)" in caplog.text
    closed = {str(tmp_path)}
    with pytest.raises(PermissionError):
        run_folders(tmp_path)
