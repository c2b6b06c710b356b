"""Locks on open files: one holder, probes by readers, and the end with the file."""

import fcntl

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
