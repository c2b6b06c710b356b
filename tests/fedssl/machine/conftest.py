import pytest

from fedssl.machine import memory as module


@pytest.fixture
def cgroups(monkeypatch, tmp_path):
    """Return a function that makes the process one of a cgroup, of files in a folder instead of the kernel's."""
    monkeypatch.setattr(module, "_MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(module, "_OWN_CGROUPS", tmp_path / "self")

    def enter(line):
        (tmp_path / "self").write_text(f"5:cpuset,devices:/other\n1:name=systemd:/other\n{line}\n")
        return tmp_path / "cgroup"

    return enter
