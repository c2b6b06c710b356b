"""Random generators: each draw is a pure function of (run seed, purpose, round, client).

Draws do not depend on the process or the order in which clients run, so that all engines, a resumed run and a repeated
run draw the same numbers.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # devices may lack it
    import torch


def derive_seed(seed: int, *seed_path: int | str) -> int:
    """Return a seed of 63 bits for ``seed_path``, e.g. ``derive_seed(seed, "train", round, client)``.

    Strings and numbers are hashed by NumPy's ``SeedSequence``; different paths give independent streams.
    """
    entropy = [int.from_bytes(part.encode(), "little") if isinstance(part, str) else part for part in seed_path]
    return int(np.random.SeedSequence([seed, *entropy]).generate_state(1, np.uint64)[0] >> 1)


def seed_generators(seed: int, device: "torch.device") -> None:
    """Seed torch's global generators of the device and the CPU, and those of Python and NumPy.

    Layers such as dropout use that of the device, and methods that of the CPU if all devices must draw the same.
    ``torch.manual_seed`` would seed the generators of all devices; before CUDA is initialized it queues each call with
    its stack.
    """
    import torch

    _seed_python(seed)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).manual_seed(seed)


@contextmanager
def python_seed(seed: int | None) -> Iterator[None]:
    """Seed the global generators of Python and NumPy, from which the user's classes may draw, and restore them.

    None only restores them, so that no seed decides later draws of other libraries in the process.
    """
    before = random.getstate(), np.random.get_state()
    try:
        if seed is not None:
            _seed_python(seed)
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _seed_python(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


def numpy_generator(seed: int, *seed_path: int | str) -> np.random.Generator:
    """Return the NumPy generator of ``seed_path``."""
    return np.random.default_rng(derive_seed(seed, *seed_path))


def torch_generator(seed: int, *seed_path: int | str) -> "torch.Generator":
    """Return the CPU torch generator of ``seed_path``."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *seed_path))
