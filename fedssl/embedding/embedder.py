"""An encoder as a function of NumPy arrays, computed by torch or by ONNX Runtime alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.datasets.raster import MAXIMA
from fedssl.errors import InputError

# Modules, and the packages that they need.
BACKENDS = {
    "torch": ("fedssl.embedding.torch_backend", "torch"),
    "onnx": ("fedssl.embedding.onnx_backend", "onnxruntime"),
}
MAX_BATCH = 256  # images
_BATCH_VALUES = 2**22  # of the images of a batch on a CPU: larger ones need more memory and are no faster


class Embedder(ABC):
    """An encoder: stored images ``(n, channels, size, size)`` to features float32 ``(n, dimension)``.

    Attributes
    ----------
    dimension, channels, size : int
        Of the features and of the images.
    pixels : mapping
        Settings of the pixels in its training, see `fedssl.datasets.raster.PixelSettings`.
    digest : str
        SHA-256 of its file.
    device : str
        Where it computes.
    """

    def __init__(
        self, *, dimension: int, channels: int, size: int, pixels: Mapping[str, Any], digest: str, device: str
    ) -> None:
        self.dimension, self.channels, self.size = dimension, channels, size
        self.pixels, self.digest, self.device = pixels, digest, device

    @property
    def batch_size(self) -> int:
        """Number of images that are computed at once."""
        if self.device != "cpu":
            return MAX_BATCH
        return min(max(_BATCH_VALUES // (self.channels * self.size**2), 8), MAX_BATCH)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Return the features of images of a dtype of `MAXIMA`, of any number."""
        shape = (self.channels, self.size, self.size)
        if images.ndim != 4 or images.shape[1:] != shape or str(images.dtype) not in MAXIMA:
            raise InputError(
                f"images are {images.dtype} of shape {images.shape}, but this encoder takes {', '.join(MAXIMA)} of "
                f"shape (n, {', '.join(map(str, shape))}); read files with fedssl.embedding.embed_path"
            )
        if not len(images):
            return np.empty((0, self.dimension), np.float32)
        features = self._compute(images)
        if not np.isfinite(features).all():
            raise InputError(
                "the encoder gives features that are NaN or infinite, so its training has diverged; lower optimizer.lr"
            )
        return features

    @abstractmethod
    def _compute(self, images: np.ndarray) -> np.ndarray: ...


def load_embedder(
    source: str | Path, *, device: str = "auto", backend: str = "torch", folders: Sequence[Path] = ()
) -> Embedder:
    """Load the encoder of a run; raise an `InputError` if there is none.

    Parameters
    ----------
    source : str or Path
        Folder of a finished run, or the file of its encoder; ``backend="onnx"`` reads an export with ``format=onnx``.
    device : str
        "auto", "cpu", "cuda", "mps", or another device of torch.
    backend : {"torch", "onnx"}
        What computes. ONNX Runtime needs less memory, and no torch.
    folders : sequence of Path
        Config directories with further encoders.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend={backend} does not exist; choose one of {', '.join(BACKENDS)}")
    module, package = BACKENDS[backend]
    if find_spec(package) is None:
        other = next(name for name in BACKENDS if name != backend)
        raise InputError(f"backend={backend} needs {package}; pip install {package}, or set backend={other}")
    embedder: Embedder = import_module(module).load(Path(source), device=device, folders=folders)
    return embedder
