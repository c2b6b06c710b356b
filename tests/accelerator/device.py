"""A strict accelerator without hardware: the devices ``pretend:0`` and ``pretend:1`` of torch, written in C++.

Their tensors compute with the CPU's kernels on memory of the host, so that the numbers are those of the CPU, and raise
what those of a GPU raise: on operands of two devices, ``numpy()``, and generators of the CPU. They have own generators,
autocast as CUDA's, pinned memory, memory statistics, a limit of memory, and streams that do nothing. A copy to the host
that does not block leaves NaN until the host waits for the device; a copy from pinned memory that does not block raises
an error then if that memory has been changed.

`register` cannot be undone: torch accepts one such device in a process, and `torch.accelerator` then finds it. Tests
use the fixture ``accelerator`` of `conftest.py`, which calls functions in a child process. In such a process::

    with recorded() as events:
        train(...)
    Counter(event.kind for event in events)                # {"to_device": 2, "to_host": 2, "synchronize": 2}
    Counter((event.kind, event.site) for event in events)  # site: "fedssl/model_arrays.py:load_layers"

Kinds are copies ``to_device``, ``to_host`` and ``between_devices``, and ``synchronize``: the host waits. A copy that
blocks is two events. Copies from and to pinned memory with ``non_blocking=True`` do not wait, and neither do operators,
except those whose result, or its size, the host needs (``item``, ``nonzero``, ``masked_select``).
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType

import torch

NAME = "pretend"
ROOT = Path(__file__).parents[2]
SOURCES = sorted((Path(__file__).parent / "backend").iterdir())
PACKAGES = ("fedssl", "strategies", "client_app", "server_app", "simulation")


@dataclass(frozen=True)
class Event:
    """A copy between devices, or the host's wait for a device."""

    kind: str  # to_device, to_host, between_devices or synchronize
    operator: str  # of torch
    num_bytes: int  # copied; 0 for synchronize
    site: str  # the innermost function of the project, as "fedssl/training.py:train"; "" outside
    caller: str  # the function of the project that called this one; "" outside


def compiler() -> str | None:
    """Return the C++ compiler, or None without one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Compile the extension, once for its sources and torch (ten seconds), and return the file."""
    content = b"".join(source.read_bytes() for source in SOURCES)
    digest = hashlib.sha256(content + torch.__version__.encode() + str(compiler()).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedssl-tests"
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"{NAME}-{digest}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of tests start at the same time
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    installed = Path(torch.__file__).parent
    include = [f"-I{installed / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    link = [f"-L{installed / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    source = Path(__file__).parent / "backend" / "operators.cpp"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, "built.so")
        command = [str(compiler()), "-std=c++20", "-O1", "-s", "-shared", "-fPIC", "-w", *include, str(source), *link]
        subprocess.run([*command, "-o", str(built)], check=True)
        built.rename(library)


def register(devices: int = 2) -> None:
    """Register the devices in this process. It must be called before torch uses an accelerator."""
    library = ctypes.CDLL(str(build()))
    library.pretend_register(ctypes.c_int64(devices))
    library.pretend_record_with(_on_event)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(devices))
    torch.utils.generate_methods_for_privateuse1_backend()


def _device_module(devices: int) -> ModuleType:
    """Return the module ``torch.pretend``, with the functions of ``torch.cuda`` that any device has."""
    module, here, ops = ModuleType(f"torch.{NAME}"), torch.accelerator, torch.ops.pretend

    def index_of(device: torch.device | str | int | None = None) -> int:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return here.current_device_index() if index is None else index

    def set_rng_state(state: torch.Tensor, device: torch.device | str | int = NAME) -> None:
        ops.set_rng_state(index_of(device), state)

    def manual_seed_all(seed: int) -> None:
        for index in range(devices):
            ops.seed(index, seed)

    module.is_available = module.is_initialized = lambda: True
    module.is_bf16_supported = lambda including_emulation=True: True
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.device_count = lambda: devices
    module.current_device = here.current_device_index
    module.set_device = here.set_device_index
    module.get_device_name = lambda device=None: f"Pretend {index_of(device)}"
    module.device = lambda device: here.device_index(index_of(device))
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = lambda device=None: here.current_stream(index_of(device))
    module.synchronize = lambda device=None: here.synchronize(index_of(device))
    module.manual_seed = lambda seed: ops.seed(here.current_device_index(), seed)
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device=NAME: ops.rng_state(index_of(device))
    module.set_rng_state = set_rng_state
    module.empty_cache = here.empty_cache
    module.mem_get_info = lambda device=None: here.get_memory_info(index_of(device))
    module.memory_allocated = lambda device=None: here.memory_allocated(index_of(device))
    module.max_memory_allocated = lambda device=None: here.max_memory_allocated(index_of(device))
    module.memory_reserved = lambda device=None: here.memory_reserved(index_of(device))
    module.reset_peak_memory_stats = lambda device=None: here.reset_peak_memory_stats(index_of(device))
    return module


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """Collect the events of all threads of this process inside the block."""
    events: list[Event] = []
    _collectors.append(events)
    try:
        yield events
    finally:
        _collectors.remove(events)


@contextmanager
def limited_memory(device: torch.device, num_bytes: int) -> Iterator[None]:
    """Limit the memory of a device inside the block; more raises `torch.OutOfMemoryError`."""
    total = torch.accelerator.get_memory_info(device)[1]
    torch.ops.pretend.set_memory(device.index, num_bytes)
    try:
        yield
    finally:
        torch.ops.pretend.set_memory(device.index, total)


_collectors: list[list[Event]] = []


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
def _on_event(kind: bytes, operator: bytes, num_bytes: int) -> None:
    if _collectors:
        sites = list(islice(dict.fromkeys(_project_functions(sys._getframe())), 2))
        event = Event(kind.decode(), operator.decode(), num_bytes, *sites, *[""] * (2 - len(sites)))
        for events in _collectors:
            events.append(event)


def _project_functions(frame: FrameType | None) -> Iterator[str]:
    """Yield the functions and methods of the project in the stack, the innermost first."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in PACKAGES:
            yield f"{file.relative_to(ROOT)}:{frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
