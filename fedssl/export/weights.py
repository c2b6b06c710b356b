"""``format=safetensors``: what an ``encoder.pt`` holds, as one file of https://github.com/huggingface/safetensors.

The weights have the encoder's own names. All else is JSON under ``fedssl`` in the file's metadata: ``format``,
``encoder`` (its settings), ``mean``, ``std`` and ``metadata``. ``fedssl.export.load_encoder`` reads it back.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedssl.export.extras import require_packages
from fedssl.untrusted import open_regular_file

KEY = "fedssl"


def write_safetensors(file: Path, content: Mapping[str, Any]) -> None:
    """Write what `fedssl.export.read_content` returns."""
    described = {key: value for key, value in content.items() if key != "weights"}
    write_weights(file, content["weights"], metadata={KEY: json.dumps(described)})


def write_weights(file: Path, weights: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> None:
    """Write tensors by name, and texts by name beside them."""
    from safetensors.torch import save

    # "format" is what transformers asks for.
    tensors = {name: value.contiguous() for name, value in weights.items()}
    file.write_bytes(save(tensors, {"format": "pt", **metadata}))


def read_safetensors(file: Path, *, max_bytes: int) -> dict[str, Any]:
    """Read what `write_safetensors` wrote, unproven.

    Parameters
    ----------
    max_bytes : int
        Bytes.

    Raises
    ------
    InputError
        The package is missing.
    OSError
        The file cannot be opened, or is larger.
    Exception
        What safetensors and JSON raise for other files.
    """
    require_packages(f"{file}", "safetensors")
    from safetensors import safe_open

    open_regular_file(file, max_bytes=max_bytes).close()
    with safe_open(file, "pt") as stored:
        described: dict[str, Any] = json.loads((stored.metadata() or {})[KEY])
        return {**described, "weights": {name: stored.get_tensor(name) for name in stored.keys()}}  # noqa: SIM118, it is no dictionary
