"""Available cores, glibc's allocator, and optimizer steps without torch's wrappers."""

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedssl.config.load import compose
from fedssl.machine.process import available_cores, configure_process, optimizer_step


class WrappedSGD(torch.optim.SGD):
    """Optimizer with a further wrapper around its step."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)
        return super().step()


OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.1),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "wrapped": lambda weights: WrappedSGD(weights, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_equal_those_of_torch(kind):
    results = []
    for step in (optimizer_step, lambda optimizer: optimizer.step()):
        weights = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = OPTIMIZERS[kind]([weights])
        for _ in range(5):
            optimizer.zero_grad()
            (weights**3).sum().backward()
            step(optimizer)
        results.append(weights.detach())
    assert torch.equal(*results)
    assert torch.is_grad_enabled()


def write_v2(folder, cores):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text("max 100000\n" if cores is None else f"{cores * 50_000:.0f} 50000\n")


def write_v1(folder, cores):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text("-1\n" if cores is None else f"{cores * 50_000:.0f}\n")
    (folder / "cpu.cfs_period_us").write_text("50000\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs an affinity")
@pytest.mark.parametrize(
    ("line", "write", "root"),
    [
        ("0::/kubepods/pod/one", write_v2, "."),
        ("0::/docker/0123", write_v2, "."),  # of the host; the container's own is the root
        ("4:cpu,cpuacct:/kubepods/pod/one", write_v1, "cpu"),
        ("4:cpuacct,cpu:/docker/0123", write_v1, "cpu"),
    ],
)
def test_the_smallest_quota_of_containers_limits_the_cores(cgroups, monkeypatch, line, write, root):
    top = cgroups(line) / root
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    assert available_cores() == 16
    for folder in (top / "kubepods/pod/one", top / "kubepods") if "kubepods" in line else (top,):
        for cores, allowed in ((2, 2), (1.5, 2), (0.1, 1), (64, 16), (None, 16)):
            write(folder, cores)
            assert available_cores() == allowed
    write(top / "other", 1)
    assert available_cores() == 16


@pytest.mark.heavy
def test_a_quota_of_the_kernel():
    root = Path("/sys/fs/cgroup/cpu")
    folder = root / f"fedssl-{os.getpid()}"
    program = "from fedssl.machine.process import available_cores; print(available_cores())"
    command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', folder, sys.executable, "-c", program]
    try:
        folder.mkdir()
        (folder / "cpu.cfs_quota_us").write_text("100000")  # a period
    except OSError as error:
        pytest.skip(f"this system permits no quota ({error})")
    try:
        assert int(subprocess.run(command, capture_output=True, check=True).stdout) == 1
    finally:
        folder.rmdir()


def test_more_threads_than_cores_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    settings, cores = compose([]).machine, available_cores()
    threads = torch.get_num_threads()
    for number in (cores, cores + 1):
        configure_process(replace(settings, threads=number))
    torch.set_num_threads(threads)
    (message,) = [line for line in caplog.messages if "wait for each other" in line]
    assert message == f"threads={cores + 1} wait for each other on {cores} cores; set threads={cores}"
