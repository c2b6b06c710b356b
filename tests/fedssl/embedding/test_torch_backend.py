"""The encoder that torch computes: its features do not depend on the batch, and other arrays are refused."""

from pathlib import Path

import numpy as np
import pytest

from fedssl.embedding.torch_backend import load
from fedssl.errors import InputError
from tests.fedssl.export.test_formats import SMALL, write_encoder


def test_features_depend_on_the_image_alone(tmp_path: Path) -> None:
    write_encoder(tmp_path / "encoder.pt", SMALL)
    embedder = load(tmp_path / "encoder.pt", device="cpu", folders=())
    images = np.random.default_rng(0).integers(0, 256, (embedder.batch_size + 3, 3, 8, 8), dtype=np.uint8)
    features = embedder(images)
    assert features.dtype == np.float32
    for row in (0, embedder.batch_size):
        np.testing.assert_allclose(features[row], embedder(images[[row]])[0], atol=1e-6)
    assert embedder(images[:0]).shape == (0, embedder.dimension)
    with pytest.raises(InputError, match="takes uint8"):
        embedder(np.zeros((2, 3, 9, 9), np.uint8))
