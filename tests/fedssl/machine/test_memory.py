"""Memory: what the system and the cgroups of the process leave."""

import mmap
import subprocess
import sys

import pytest

from fedssl.machine import memory
from fedssl.machine.memory import available_memory
from tests.memory_cgroup import NoMemoryCgroup, memory_cgroup

FAR = 2**60  # no limit, as version 1 reports it


def write_v2(folder, limit, used, *, active=0, inactive=0, mapped=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon 5\nactive_file {active}\ninactive_file {inactive}\nfile_mapped {mapped}\n"
    (folder / "memory.stat").write_text(stat)


def write_v1(folder, limit, used, *, active=0, inactive=0, mapped=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    own = "active_file 1\ninactive_file 1\nmapped_file 1\n"  # without those of cgroups inside
    files = f"total_active_file {active}\ntotal_inactive_file {inactive}\ntotal_mapped_file {mapped}\n"
    (folder / "memory.stat").write_text(own + files)


def test_without_a_limit_it_is_that_of_the_system(cgroups):
    mount = cgroups("0::/user.slice")
    free = available_memory()
    assert free > 10**6
    write_v2(mount / "user.slice", "max", 10)
    assert available_memory() > 10**6
    write_v2(mount / "user.slice", 1000, 10)
    (mount / "user.slice" / "memory.stat").write_text("anon 5\n")  # of another kernel
    assert available_memory() > 10**6
    write_v1(mount / "memory", FAR, 10)
    cgroups("4:memory:/")
    assert available_memory() > 10**6


@pytest.mark.parametrize(
    ("line", "write", "root"),
    [
        ("0::/system.slice/fedssl.service", write_v2, "."),
        ("4:memory:/system.slice/fedssl.service", write_v1, "memory"),
        ("4:hugetlb,memory:/system.slice/fedssl.service", write_v1, "memory"),
    ],
)
def test_the_smallest_limit_of_nested_cgroups_counts(cgroups, line, write, root):
    slice = cgroups(line) / root / "system.slice"
    write(slice / "fedssl.service", 1000, 600, active=20, inactive=30, mapped=15)
    assert available_memory() == 1000 - 600 + 20 + 30 - 15
    write(slice / "fedssl.service", 1000, 600, active=20, inactive=30, mapped=60)
    assert available_memory() == 1000 - 600  # shared memory is mapped, too
    write(slice, 2000, 1900)
    assert available_memory() == 2000 - 1900
    write(slice.parent, 3000, 3050)
    assert available_memory() == 0  # a limit that was lowered
    assert available_memory(reusable=70) == 70


@pytest.mark.parametrize(
    ("line", "write", "root"),
    [("0::/", write_v2, "."), ("0::/../../fedssl.service", write_v2, "."), ("4:memory:/docker/01", write_v1, "memory")],
)
def test_a_container_has_its_limit_at_the_root(cgroups, line, write, root):
    """Its path may be that of its host, of which the container has no folder."""
    write(cgroups(line) / root, 1000, 600)
    assert available_memory() == 400


@pytest.mark.heavy
def test_a_limit_of_the_kernel():
    """A new process of Python uses less than 100 of the 200 MB."""
    program = "from fedssl.machine.memory import available_memory; print(available_memory())"
    try:
        with memory_cgroup(200 * 10**6) as group:
            done = subprocess.run(group.command([sys.executable, "-c", program]), capture_output=True, check=True)
    except NoMemoryCgroup as reason:
        pytest.skip(str(reason))
    assert 100 * 10**6 < int(done.stdout) < 200 * 10**6


def test_a_limit_of_addresses_counts():
    code = "from fedssl.machine.memory import available_memory; print(available_memory())"
    command = ["bash", "-c", 'ulimit -v 2000000; exec "$@"', "bash", sys.executable, "-c", code]
    found = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 10**8 < found < 2_000_000 * 1024


def test_memory_that_the_process_has_kept_is_available():
    assert available_memory(reusable=2**50) > 2**50
    memory._first_private_memory.cache_clear()
    before = memory.grown_memory()
    with mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        for page in range(0, 2**26, mmap.PAGESIZE):
            kept[page] = 1
        assert memory.grown_memory() - before > 2**25
