"""glibc's allocator, and optimizer steps without torch's wrappers."""

import functools
import os
import subprocess
import sys

import pytest
import torch

from fedssl.machine.process import optimizer_step

ARENAS = """
import ctypes, sys, threading
from fedssl.machine.process import tune_allocator
if sys.argv[1] == "tuned" and not tune_allocator():
    sys.exit("another C library")
libc = ctypes.CDLL("libc.so.6")
libc.fopen.restype = ctypes.c_void_p
thread = threading.Thread(target=lambda: libc.malloc(1000))
thread.start()
thread.join()
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
"""


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


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
@pytest.mark.parametrize(("allocator", "arenas"), [("tuned", 1), ("default", 2)])
def test_threads_share_one_arena(tmp_path, allocator, arenas):
    heaps = tmp_path / "malloc.xml"
    command = [sys.executable, "-c", ARENAS, allocator, str(heaps)]
    environment = {k: v for k, v in os.environ.items() if k not in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "another C library" in done.stderr:
        pytest.skip("needs glibc")
    assert done.returncode == 0, done.stderr
    assert heaps.read_text().count("<heap nr=") == arenas
