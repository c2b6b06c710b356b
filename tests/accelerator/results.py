"""All numbers of a run folder, to compare two runs: models, client states, snapshots, and the lines of its files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from client_app.state_store import read_state
from fedssl.export import load_encoder

# Of two runs with the same numbers.
UNEQUAL = ("bytes_down", "seconds", "memory", "overrides", "command", "checksum", "versions")
Numbers = dict[str, np.ndarray]


def numbers_of(folder: Path) -> Numbers:
    """Read a run folder without any accelerator: tensors that a device has written could not be loaded."""
    found: Numbers = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            found |= {f"{file.relative_to(folder)} {place}": value for place, value in _flat(_read(file, folder))}
    return found


def _read(file: Path, folder: Path) -> Any:
    place = file.relative_to(folder).parts
    if file.suffix == ".safetensors":
        return read_state(file) if place[0] == "clients" else load_file(file)
    if file.suffix == ".pt":
        return load_encoder(file).state_dict() if len(place) == 1 else torch.load(file, weights_only=True)
    if file.suffix == ".npz":
        return dict(np.load(file))
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    return json.loads(file.read_text()) if file.suffix == ".json" and place[0] != "checkpoints" else None


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            if not str(key).endswith(UNEQUAL):
                yield from _flat(inner, f"{place}/{key}")
    elif isinstance(value, torch.Tensor):
        assert value.device.type == "cpu"
        yield place, value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    elif isinstance(value, np.ndarray | int | float) and not isinstance(value, bool):
        yield place, np.asarray(value)


def assert_equal(found: Numbers, expected: Numbers, *, atol: float = 0.0) -> None:
    """Compare numbers: their bits, or with an absolute tolerance for weights, losses and accuracies."""
    assert found.keys() == expected.keys()
    assert expected
    unequal = {}
    for place, value in expected.items():
        other = found[place]
        assert (other.dtype, other.shape) == (value.dtype, value.shape), place
        if not np.array_equal(other, value, equal_nan=value.dtype.kind == "f"):
            unequal[place] = float(np.abs(other.astype(np.float64) - value).max())
    beyond = {place: difference for place, difference in unequal.items() if not difference <= atol}
    assert not beyond, f"{len(beyond)} of {len(expected)} differ: {dict(list(beyond.items())[:5])}"
