"""Runs on images of 13 channels with 12 bits: training, evaluation, and the encoder's preprocessing."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from fedssl.datasets.decoding import Decoding
from fedssl.export import load_encoder
from simulation.run import run
from tests.runs import read_lines

BANDS = {"photometric": "minisblack", "planarconfig": "contig"}
RUN = {
    "num_clients": 2,
    "rounds": 1,
    "batch_size": 8,
    "evaluation": "knn",
    "encoder.width": 4,
    "threads": 1,
    "engine": "local",
    "final_evaluation": "none",
    "measure_resources": "false",
}
DATA = {"channels": 13, "size": 8, "window": "[0,4095]", "mean": "[0.5]", "std": "[0.3]", "test_fraction": 0.25}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, which differ in the last channel."""
    random, root = np.random.default_rng(0), tmp_path_factory.mktemp("tiles")
    for index in range(40):
        values = random.integers(0, 4096, (8, 8, 13), dtype=np.uint16)
        values[..., 12] = values[..., 12] // 4 + 3000 * (index % 2)
        file = root / "data" / ("forest" if index % 2 else "water") / f"{index}.tif"
        file.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(file, values, **BANDS)
    return root / "data"


def trained(images: Path, folder: Path, **changes: object) -> list[dict]:
    settings = {"dataset": "folder", "augmentation": "satellite", "dataset.path": images, "output_dir": folder}
    settings |= RUN | {f"dataset.{key}": value for key, value in DATA.items()} | changes
    run([f"{key}={value}" for key, value in settings.items()])
    lines = read_lines(folder / "metrics.jsonl")
    return [{key: line[key] for key in ("model_cosine", "evaluation", "health") if key in line} for line in lines]


def test_a_run_from_files_to_features(images, tmp_path):
    decoded = trained(images, tmp_path / "decoded")
    encoded = trained(images, tmp_path / "encoded", **{"dataset.storage": "encoded"})
    assert decoded == encoded
    assert decoded[-1]["evaluation"]["knn"] >= 0.7  # of two classes

    encoder = load_encoder(tmp_path / "decoded" / "encoder.pt")
    assert (encoder.channels, encoder.preprocess.window) == (13, [0, 4095])
    files = sorted(images.glob("*/*.tif"))[:4]
    values = np.stack([tifffile.imread(file) for file in files]).transpose(0, 3, 1, 2)
    expected = (torch.from_numpy(values / 4095).float() - 0.5) / 0.3
    assert torch.allclose(encoder.preprocess(list(files)), expected, atol=1e-4)  # 16 bits
    for kind in (np.uint16, np.int32, np.float32):
        assert torch.allclose(encoder.preprocess(torch.from_numpy(values.astype(kind))), expected, atol=1e-6)


def test_cmyk_of_16_bits_keeps_its_bits(tmp_path):
    cmyk = np.random.default_rng(0).integers(0, 65536, (8, 8, 4), dtype=np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", cmyk, photometric="separated", planarconfig="contig")
    rgb = Decoding(channels=3, size=8)(tmp_path / "a.tif")
    ink = cmyk.astype(np.float64) / 65535
    assert rgb.dtype == np.uint16
    assert np.abs(rgb.transpose(1, 2, 0) - 65535 * (1 - ink[..., :3]) * (1 - ink[..., 3:])).max() <= 0.51
    with Image.open(tmp_path / "a.tif") as image:  # Pillow's conversion of the upper 8 bits
        assert np.abs(np.asarray(image.convert("RGB")) - rgb.transpose(1, 2, 0) / 257).max() <= 3
    assert np.array_equal(Decoding(channels=4, size=8)(tmp_path / "a.tif").transpose(1, 2, 0), cmyk)
