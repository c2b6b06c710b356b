"""An encoder that ONNX Runtime computes: an export with ``format=onnx``. No module here imports torch."""

import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.datasets.raster import convert, pixel_settings
from fedssl.digests import file_identity
from fedssl.embedding.embedder import Embedder
from fedssl.errors import InputError, reason_of
from fedssl.logs import log_once
from fedssl.machine.process import available_cores
from fedssl.safe_io import valid_text

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "mps": "CoreMLExecutionProvider"}


class OnnxEmbedder(Embedder):
    """The graph of an export."""

    def __init__(self, session: Any, *, digest: str, device: str) -> None:
        self._session, about = session, json.loads(session.get_modelmeta().custom_metadata_map["fedssl"])
        self._takes_bytes = session.get_inputs()[0].type == "tensor(uint8)"
        self.encoder_digest = about.get("digest")  # of the file that was exported; None for older exports
        super().__init__(
            dimension=about["feature_dim"],
            channels=about["encoder"]["channels"],
            size=about["encoder"]["size"],
            pixels=pixel_settings(about["metadata"]),
            digest=digest,
            device=device,
        )
        # The graph takes the values of files, of which stored images have the part of the window that is in [0, 1].
        low, high = self.pixels["window"] or (0, 1)
        self._low, self._range = np.float32(low), np.float32(high - low)

    def outputs(self, images: np.ndarray) -> list[np.ndarray]:
        """Return all outputs of the graph: the features, and those that another program appended."""
        if self._takes_bytes and images.dtype != np.uint8:
            line = "images of more than 8 bits are rounded to 8, which this graph takes; backend=torch keeps all bits"
            log_once(logging.WARNING, line)
        pixels = convert(images, "uint8" if self._takes_bytes else "float32")
        if not self._takes_bytes:
            pixels = self._low + self._range * pixels
        outputs: list[np.ndarray] = self._session.run(None, {self._session.get_inputs()[0].name: pixels})
        return outputs

    def _compute(self, images: np.ndarray) -> np.ndarray:
        return self.outputs(images)[0]


def load(source: Path, *, device: str, folders: Sequence[Path]) -> OnnxEmbedder:
    """Load an encoder, see `fedssl.embedding.load_embedder`; ``folders`` are not needed."""
    import onnxruntime

    file = graph_file(source)
    provider = _PROVIDERS.get("cpu" if device == "auto" else device)
    if provider not in (available := onnxruntime.get_available_providers()):
        allowed = ", ".join(name for name, provider in _PROVIDERS.items() if provider in available)
        raise InputError(f"device={device} but this ONNX Runtime has {allowed} only; set one of these, or device=auto")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = available_cores()
    options.enable_cpu_mem_arena = False  # which would keep twice the memory of the largest layer
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # decoding threads need the cores
    try:
        # ONNX Runtime refuses paths that are not UTF-8, and bytes of a graph with further files.
        graph = str(file) if valid_text(str(file)) == str(file) else file.read_bytes()
        session = onnxruntime.InferenceSession(graph, options, providers=[provider])
        kind = next(name for name, value in _PROVIDERS.items() if value == provider)
        embedder = OnnxEmbedder(session, digest=file_identity(file), device=kind)
    except InputError:
        raise
    except Exception as error:  # a damaged or foreign file can raise any exception
        raise InputError(
            f"{file} is damaged, or no encoder that `fedssl-export format=onnx` wrote ({reason_of(error)}); "
            "export it again"
        ) from error
    encoder = source / "encoder.pt" if source.is_dir() else source
    if file != source and encoder.is_file() and embedder.encoder_digest != file_identity(encoder):
        raise InputError(f"{file} is the export of another {encoder.name}; write it again with: {_command(source)}")
    return embedder


def graph_file(source: Path) -> Path:
    """Return the file of an export; `InputError` if there is none."""
    file = source / "encoder.onnx" if source.is_dir() else source.with_suffix(".onnx")
    if not file.is_file():
        remedy = "correct the path" if file == source else f"make it with: {_command(source)}"
        raise InputError(f"{file} does not exist, which backend=onnx needs; {remedy}")
    return file


def _command(source: Path) -> str:
    setting = f"run={source}" if source.is_dir() else f"encoder={source}"
    return f"fedssl-export {shlex.quote(setting)} format=onnx"
