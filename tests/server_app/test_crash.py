"""A full disk, or the end of the process, at every point where a run writes: the resumed run is the uninterrupted one.

``--heavy`` takes every point; without it some are taken.
"""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fedssl.errors import InputError, RunError
from fedssl.runs import manifest
from server_app.checkpoint import latest_checkpoint
from simulation.run import run
from tests.cases import some
from tests.runs import KNN, SMALL, ending, model_bits, read_lines

WORDS = [*SMALL, *KNN, "rounds=2", "method=byol", "collapse_images=6", "keep_checkpoints=1"]
VARY = {"seconds", "client_seconds", "bytes_up", "bytes_down"}  # bytes: the name of the folder travels


class Killed(BaseException):
    """The process ends here."""


class Fault:
    """Counts what is written, and raises at one of the points."""

    def __init__(self, monkeypatch):
        self.count, self.at, self.error = 0, -1, None
        sync, append = os.fsync, manifest.append_text
        monkeypatch.setattr(os, "fsync", lambda descriptor: self.step() or sync(descriptor))
        monkeypatch.setattr(
            manifest, "append_text", lambda file, text: self.write_half(file, text) or append(file, text)
        )

    def step(self):
        self.count += 1
        if self.count == self.at:
            raise self.error

    def write_half(self, file, text):
        if self.count + 1 == self.at:
            with file.open("a") as stream:
                stream.write(text[: len(text) // 2])
        self.step()


@pytest.fixture
def fault(monkeypatch):
    return Fault(monkeypatch)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What an uninterrupted run leads to."""
    folder = tmp_path_factory.mktemp("good") / "good"
    run([*WORDS, f"output_dir={folder}"])
    return result(folder)


def result(folder):
    """What must be the same: bits of the model, lines without what varies, and the files there are."""
    lines = [line for name in manifest.JSONL_FILES for line in read_lines(folder / name)]
    lines = [{key: value for key, value in line.items() if key not in VARY} for line in lines]
    # Beside the newest checkpoint the one before may be left.
    found = [one for one in folder.rglob("*") if one.is_file() and one.parent.name != "checkpoints"]
    files = sorted(str(one.relative_to(folder)) for one in found)
    return model_bits(folder), lines, files


def said_of(folder):
    """What ended a new run there, one sentence; None: nothing."""
    said = "No space left on device"
    try:
        run([*WORDS, f"output_dir={folder}"])
    except (InputError, RunError) as error:
        said = str(error)
    except Killed:
        pass
    else:
        return None
    assert "No space left on device" in said
    assert "\n" not in said
    return said


def go_on(folder):
    """Resume the run, or begin it where it had not begun."""
    begun = (folder / "config.yaml").exists()
    run([f"resume={folder}"] if begun else [*WORDS, f"output_dir={folder}"])
    assert ending(folder)[0] == "finished"


POINTS = 46  # of a run


@pytest.mark.heavy
def test_faults_may_be_at_all_points_of_a_run(tmp_path, fault):
    run([*WORDS, f"output_dir={tmp_path / 'run'}"])
    assert fault.count == POINTS


@pytest.mark.parametrize("point", some(range(2, POINTS + 1, 3), default=[32]))
def test_a_run_resumes_to_equal_bits_after_a_fault(tmp_path, fault, point, expected):
    for name, error in {"full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "kill": Killed()}.items():
        fault.count, fault.at, fault.error = 0, point, error
        folder = tmp_path / name
        assert said_of(folder) is not None
        assert not list(folder.rglob("*.partial"))
        latest_checkpoint(folder / "checkpoints")  # none, or a good one
        fault.at = -1
        go_on(folder)
        assert result(folder) == expected


@pytest.mark.heavy
def test_what_a_killed_process_left_is_removed(tmp_path):
    folder = tmp_path / "run"
    run([*WORDS, f"output_dir={folder}"])
    files = result(folder)[2]
    for name in (".metrics.jsonl.99.partial", "checkpoints/.round-000003.pt.99.partial", "clients/0000/0/.x.9.partial"):
        (folder / name).write_text("half")
    run([f"resume={folder}", "rounds=3"])
    assert not list(folder.rglob("*.partial"))
    assert {name for name in files if "round-" not in name} <= set(result(folder)[2])


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of so many kibibytes; only root may."""
    mounted = []

    def mount(size):
        place = tmp_path / f"disk{size}"
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(place)]
        if os.geteuid() or not shutil.which("mount") or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("file systems cannot be mounted here")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.heavy
def test_a_small_disk_is_one_sentence_and_the_run_resumes(small_disk, expected):
    ended = 0
    for size in (8, 100, 400, 900, 1300, 1700, 2100, 2500, 2900, 3300, 3700, 4100, 5000):
        place = small_disk(size)
        ended += said_of(place / "run") is not None
        assert not list(place.rglob("*.partial"))
        subprocess.run(["mount", "-o", "remount,size=100m", str(place)], check=True)
        if not (place / "run" / "encoder.pt").exists():
            go_on(Path(place / "run"))
        assert result(place / "run")[:2] == expected[:2]
    assert ended > 5
