"""The kernel enforces the limit of a memory cgroup."""

import subprocess
import sys

import pytest

from tests.memory_cgroup import NoMemoryCgroup, memory_cgroup

LIMIT = 64 * 2**20
PROGRAM = "import sys; kept = bytearray(int(sys.argv[1])); print(len(kept))"


def allocate(group, num_bytes):
    command = group.command([sys.executable, "-S", "-c", PROGRAM, str(num_bytes)])
    return subprocess.run(command, capture_output=True).returncode


def test_a_process_beyond_the_limit_is_killed():
    try:
        with memory_cgroup(LIMIT) as group:
            assert allocate(group, LIMIT // 2) == 0
            assert LIMIT // 2 < group.peak() <= LIMIT
            assert group.oom_kills() == 0
            assert allocate(group, 2 * LIMIT) == -9
            assert group.oom_kills() == 1
            assert group.pids() == []
    except NoMemoryCgroup as reason:
        pytest.skip(str(reason))
    assert not group.folder.exists()


def test_a_reason_is_given_where_none_can_be_created(tmp_path):
    sentence = "no memory cgroup can be created in .*No such file"
    with pytest.raises(NoMemoryCgroup, match=sentence), memory_cgroup(LIMIT, root=tmp_path / "none"):
        pass
