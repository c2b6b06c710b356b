"""An encoder that torch computes, on any of its devices."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedssl.config.commands import encoder_file
from fedssl.datasets.images import TensorImages
from fedssl.datasets.raster import PIXELS
from fedssl.digests import file_identity
from fedssl.embedding.embedder import Embedder
from fedssl.evaluation.features import extract
from fedssl.export.encoder_file import load_user_encoder
from fedssl.machine.devices import select_device
from fedssl.machine.process import default_threads, one_thread


class TorchEmbedder(Embedder):
    """The encoder of an ``encoder.pt``."""

    def __init__(self, encoder: Any, *, digest: str, device: torch.device) -> None:
        self.encoder, self._device = encoder, device
        super().__init__(
            dimension=encoder.feature_dim,
            channels=encoder.channels,
            size=encoder.size,
            pixels={name: getattr(encoder.preprocess, name) for name in PIXELS},
            digest=digest,
            device=device.type,
        )

    def _compute(self, images: np.ndarray) -> np.ndarray:
        encoder, source = self.encoder, TensorImages(torch.from_numpy(images))
        with one_thread() if default_threads(self.size) == 1 else nullcontext():
            h = extract(
                encoder,
                source,
                mean=encoder.mean,
                std=encoder.std,
                device=self._device,
                batch_size=self.batch_size,
            )
        features: np.ndarray = h.numpy()
        return features


def load(source: Path, *, device: str, folders: Sequence[Path]) -> TorchEmbedder:
    """Load an encoder, see `fedssl.embedding.load_embedder`."""
    file = encoder_file(source)
    encoder = load_user_encoder(file, folders)
    return TorchEmbedder(encoder, digest=file_identity(file), device=select_device(device))
