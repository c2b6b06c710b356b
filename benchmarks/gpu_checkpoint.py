"""Checkpoints of `gpu.py`, part d: models in half precision, in files that are small enough to be returned."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strategies.types import GLOBAL, GlobalModel, ServerState

MAX_PART = 15_000_000  # bytes of a file


def save(runs: Mapping[str, Any], output: Path) -> None:
    """Write the models and their rounds as files ``checkpoint.0``, ``checkpoint.1``, ..."""
    arrays = {}
    for name, run in runs.items():
        arrays[f"{name}:round"] = np.asarray(run.state.round)
        for layer, value in run.state.models[GLOBAL].layers.items():
            arrays[f"{name}/{layer}"] = value.astype(np.float16) if value.dtype == np.float32 else value
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    content = buffer.getvalue()
    for number, start in enumerate(range(0, len(content), MAX_PART)):
        (output / f"checkpoint.{number}").write_bytes(content[start : start + MAX_PART])


def load(runs: Mapping[str, Any], first: Path) -> None:
    """Set the states of the runs to those of the checkpoint with this first file."""
    files = sorted(first.parent.glob(f"{first.stem}.*"), key=lambda file: int(file.suffix[1:]))
    arrays = np.load(io.BytesIO(b"".join(file.read_bytes() for file in files)))
    for name, run in runs.items():
        layers = {key.removeprefix(f"{name}/"): arrays[key] for key in arrays if key.startswith(f"{name}/")}
        layers = {key: x.astype(np.float32) if x.dtype == np.float16 else x for key, x in layers.items()}
        run.state = ServerState(round=int(arrays[f"{name}:round"]), models={GLOBAL: GlobalModel(layers=layers)})
