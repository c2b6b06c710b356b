"""The code of a model card computes the encoder's features of files that timm's transform would change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from fedssl import encoders
from fedssl.datasets.raster import pixel_metadata
from fedssl.export import save_encoder
from fedssl.export.formats import export
from fedssl.export.source import ExportSource
from tests.fedssl.export.made import VIT

RANDOM = np.random.default_rng(0)


def card_features(folder: Path, file: Path, *, block: int) -> torch.Tensor:
    """Run the first blocks of code of the card of a folder, and return the last features."""
    blocks = (folder / "README.md").read_text().split("```python\n")[1:]
    names: dict[str, Any] = {}
    for code in blocks[: block + 1]:
        text = code.partition("```")[0].replace("hf-hub:USER/NAME", f"local-dir:{folder}")
        exec(text.replace("FILE", str(file)), names)
    found: torch.Tensor = names["features"]
    return found


@pytest.mark.parametrize(
    ("channels", "pixels", "block"),
    [
        (1, {"window": [0, 4000]}, 0),
        (1, {"percentiles": [1, 99]}, 0),
        (1, {"background": 7}, 1),  # after the block with timm's transform, for images of 8 bits
        (5, {}, 0),
    ],
    ids=["window", "percentiles", "deep", "channels"],
)
def test_the_card_reads_files_as_in_training(tmp_path: Path, channels: int, pixels: dict[str, Any], block: int):
    settings = {**VIT, "channels": channels}
    encoder = encoders.vit_tiny(**{key: value for key, value in settings.items() if key != "_target_"})
    mean, std = [0.25] * channels, [0.5] * channels
    source = tmp_path / "encoder.pt"
    save_encoder(source, encoder, settings=settings, mean=mean, std=std, metadata=pixel_metadata(pixels))
    made = ExportSource.read(source)
    assert export(made, "huggingface", tmp_path / "folder") <= 1e-5
    values = RANDOM.integers(0, 4000, (10, 12, channels), dtype=np.uint16)
    file = tmp_path / ("image.tif" if channels > 1 else "image.png")
    if channels > 1:
        tifffile.imwrite(file, values, photometric="minisblack", planarconfig="contig")
    else:
        Image.fromarray(values[..., 0]).save(file)
    expected = made.encoder(made.encoder.preprocess(file)).detach()
    found = card_features(tmp_path / "folder", file, block=block)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    stated = "had the value 7 of 255" in (tmp_path / "folder" / "README.md").read_text()
    assert stated == (block == 1)
