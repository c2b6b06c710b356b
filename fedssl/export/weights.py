"""``format=safetensors``: the content of an ``encoder.pt`` as a file of https://github.com/huggingface/safetensors.

The weights have the encoder's parameter names. The rest is JSON under ``fedssl`` in the file's metadata: ``format``,
``encoder`` (its settings), ``mean``, ``std`` and ``metadata``. ``fedssl.export.load_encoder`` reads it back.
"""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from fedssl.errors import InputError
from fedssl.tensor_file import read_tensor_file, write_tensor_file

KEY = "fedssl"


def write_safetensors(file: Path, content: Mapping[str, Any]) -> None:
    """Write the content that `fedssl.export.read_content` returns."""
    metadata = {key: value for key, value in content.items() if key != "weights"}
    write_weights(file, content["weights"], metadata={KEY: json.dumps(metadata)})


def write_weights(file: Path, weights: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> None:
    """Write tensors and string metadata by name."""
    write_tensor_file(file, weights, metadata={"format": "pt", **metadata})  # transformers requires "format"


def read_safetensors(file: Path, *, max_bytes: int) -> dict[str, Any]:
    """Read, without validation, what `write_safetensors` wrote, up to ``max_bytes``; exceptions can have any type."""
    require_packages(str(file), "safetensors")
    weights, metadata = read_tensor_file(file, max_bytes=max_bytes)
    return {**read_metadata(metadata, file), "weights": weights}


def read_metadata(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    """Return what a safetensors file of this project states about an encoder; empty for a file of another program."""
    content: Any = json.loads(metadata.get(KEY, "{}"))
    if isinstance(content, list):  # see `fedssl.export.peft_adapter`
        raise InputError(
            f"{file} has the low-rank factors of a run with tuning=lora, which are no encoder; give the encoder.pt of "
            "the same run folder, into which they are merged"
        )
    if not isinstance(content, dict):
        raise ValueError("its metadata are not a dictionary")
    return content


def require_packages(feature: str, *packages: str) -> None:
    """Raise an `InputError` if one of the packages, given by import names, is not installed; ``feature`` needs them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        remedy = f"install it: uv sync --extra export, or pip install {' '.join(missing)}"
        raise InputError(f"{feature} needs {' and '.join(missing)}; {remedy}")
