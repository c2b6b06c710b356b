"""The one place that makes random generators: every draw is a pure function of (run seed, purpose, round, client).

Nothing depends on which process ran a client or on the order in which clients ran, so both engines, a resumed run and
a repeated run draw the same numbers.
"""

import numpy as np
import torch


def derive_seed(seed: int, *seed_path: int | str) -> int:
    """Seed of 63 bits for the place ``seed_path`` in the run, e.g. ``derive_seed(seed, "train", round, client)``.

    Words and numbers are hashed by NumPy's ``SeedSequence``; different paths give independent streams.
    """
    entropy = [int.from_bytes(part.encode(), "little") if isinstance(part, str) else part for part in seed_path]
    return int(np.random.SeedSequence([seed, *entropy]).generate_state(1, np.uint64)[0] >> 1)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's global generator of the device, from which layers such as dropout draw.

    ``torch.manual_seed`` would seed the generators of every kind of device; as long as CUDA is not in use it keeps each
    call, with its stack, for later.
    """
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def numpy_generator(seed: int, *seed_path: int | str) -> np.random.Generator:
    """NumPy generator for the place ``seed_path`` in the run."""
    return np.random.default_rng(derive_seed(seed, *seed_path))


def torch_generator(seed: int, *seed_path: int | str) -> torch.Generator:
    """CPU torch generator for the place ``seed_path`` in the run."""
    return torch.Generator().manual_seed(derive_seed(seed, *seed_path))
