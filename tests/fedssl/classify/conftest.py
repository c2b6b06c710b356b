"""An encoder, and images of three colors with some labels."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.export.cli import run as export
from tests.fedssl.export.made import SMALL, write_encoder

COLORS = {"rød, 1": (250, 60, 60), "green": (60, 250, 60), "blue": (60, 60, 250)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_encoder(folder / "encoder.pt", SMALL)
    export([f"run={folder}", "format=onnx"])
    return folder


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Noisy images of three colors, of which six each are labeled, and two of these are also in photos."""
    monkeypatch.chdir(tmp_path)
    for name in COLORS:
        for number in range(12):
            folder = Path("photos", "labeled", name) if number < 6 else Path("photos")
            write(folder / f"{name}-{number}.png", name, seed=number)
    for number in range(2):
        shutil.copy(f"photos/labeled/blue/blue-{number}.png", f"photos/copy-{number}.png")
    return tmp_path / "photos"


def write(file: Path, name: str, *, seed: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng([seed, len(name)]).integers(-60, 60, (11, 9, 3))
    Image.fromarray(np.clip(np.array(COLORS[name]) + noise, 0, 255).astype(np.uint8)).save(file)


def write_labels(file: str, *, count: int | None = None) -> None:
    """Write the labels of the first images of a table."""
    lines = table(file)
    for line in lines[:count]:
        line["label"] = line["path"].rpartition("/")[2].rpartition("-")[0].replace("copy", "blue")
    with Path(file).open("w", newline="") as stream:
        writer = csv.DictWriter(stream, lines[0].keys())
        writer.writeheader()
        writer.writerows(lines)


def table(file: str) -> list[dict[str, str]]:
    with Path(file).open(newline="") as stream:
        return list(csv.DictReader(stream))
