"""Locks on open files: one holder, probes by readers, and the end with the file."""

import fcntl
import threading

from fedssl.locks import is_locked, lock


def test_a_lock_has_one_holder_and_ends_with_its_file(tmp_path):
    file = tmp_path / "lock"
    with file.open("w") as first, file.open("w") as second:
        assert not is_locked(second.fileno())
        assert lock(first.fileno())
        assert not lock(second.fileno())
        with file.open() as reader:
            assert is_locked(reader.fileno())
        first.close()
        assert lock(second.fileno(), wait=True)


def test_probes_do_not_see_each_other(tmp_path):
    file = tmp_path / "lock"
    file.touch()
    with file.open() as one, file.open() as other:
        fcntl.flock(one, fcntl.LOCK_SH)  # as a probe that has not ended
        assert not is_locked(other.fileno())


def test_a_probe_does_not_prevent_a_lock(tmp_path):
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open() as probe, (tmp_path / "lock").open("w") as holder:
        fcntl.flock(probe, fcntl.LOCK_SH)
        threading.Timer(0.01, fcntl.flock, (probe, fcntl.LOCK_UN)).start()
        assert lock(holder.fileno(), patience=1.0)
