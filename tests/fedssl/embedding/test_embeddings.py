"""Features of the images of a path, compared with the encoder's on images that Pillow decodes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl import encoders
from fedssl.datasets.raster import pixel_metadata
from fedssl.embedding import embed_path, load_embedder
from fedssl.errors import InputError
from fedssl.export import load_encoder, save_encoder
from fedssl.export.cli import run as export
from tests.fedssl.export.test_formats import SMALL, write_encoder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    write_encoder(tmp_path / "run" / "encoder.pt", SMALL)
    return tmp_path / "run"


def write_images(folder: Path, names: list[str], *, size: int = 11) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    images = {name: generator.integers(0, 256, (size, size, 3), dtype=np.uint8) for name in names}
    for name, pixels in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name)
    return images


NAMES = [f"{kind}/{number}.png" for kind in ("cat", "dog") for number in range(20)]


def test_features_equal_those_of_the_encoder(run: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path / "photos", NAMES)
    embedder = load_embedder(run, device="cpu")
    found = embed_path(embedder, tmp_path / "photos")
    encoder = load_encoder(run / "encoder.pt")
    with torch.no_grad():
        h = encoder(encoder.preprocess([Image.fromarray(images[name]) for name in found.names]))
    assert found.names == sorted(NAMES)
    np.testing.assert_allclose(found.features, h.numpy(), atol=1e-6)
    assert [found.classes[label] for label in found.labels] == [name.partition("/")[0] for name in found.names]


@pytest.mark.parametrize("other", [[], ["other/3.png"]])
def test_images_of_all_splits_are_embedded(run: Path, tmp_path: Path, other: list[str]) -> None:
    names = ["test/cat/2.png", "train/cat/1.png", "train/dog/1.png"]
    write_images(tmp_path / "photos", [*names, *other])
    found = embed_path(load_embedder(run, device="cpu"), tmp_path / "photos")
    assert found.names == sorted([*names, *other])
    if not other:
        assert [found.classes[label] for label in found.labels] == ["cat", "cat", "dog"]


def test_images_are_decoded_again_in_another_size(run: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path / "photos", ["1.png", "2.png", "3.png"])
    found = embed_path(load_embedder(run, device="cpu"), tmp_path / "photos")
    np.testing.assert_array_equal(
        found.decode(np.array([0, 2]), size=11), [images[name].transpose(2, 0, 1) for name in ("1.png", "3.png")]
    )
    assert found.labels is None


def test_a_damaged_image_is_refused_or_left_out(run: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", ["1.png", "3.png"])
    (tmp_path / "photos" / "2.png").write_bytes(b"no image")
    embedder = load_embedder(run, device="cpu")
    with pytest.raises(InputError, match=r"1 of 3 images cannot be read: 2.png .*skip_unreadable=true"):
        embed_path(embedder, tmp_path / "photos")
    assert embed_path(embedder, tmp_path / "photos", skip_unreadable=True).names == ["1.png", "3.png"]


def test_rows_of_tables_have_names_and_values(run: Path, tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png"])
    (tmp_path / "list.csv").write_text("path,label,site\nb.png,dog,north\na.png,cat,south\n")
    found = embed_path(load_embedder(run, device="cpu"), tmp_path / "list.csv")
    assert (found.names, found.values("site")) == (["b.png", "a.png"], ["north", "south"])
    assert [found.classes[label] for label in found.labels] == ["dog", "cat"]


@pytest.mark.parametrize("settings", [{"window": [100, 3000]}, {"percentiles": [5, 95]}])
def test_backends_agree_on_scaled_values(tmp_path: Path, settings: dict[str, Any]) -> None:
    arguments = {"channels": 1, "size": 8, "width": 4}
    encoder, file = encoders.conv_small(**arguments), tmp_path / "encoder.pt"
    target = {"_target_": "fedssl.encoders.conv_small", **arguments}
    save_encoder(file, encoder, settings=target, mean=[0.5], std=[0.25], metadata=pixel_metadata(settings))
    export([f"encoder={file}", "format=onnx"])
    (tmp_path / "photos").mkdir()
    for number, values in enumerate(np.random.default_rng(0).integers(0, 4096, (3, 9, 9)).astype(np.uint16)):
        Image.fromarray(values).save(tmp_path / "photos" / f"{number}.png")
    embedders = (load_embedder(file, device="cpu", backend=backend) for backend in ("torch", "onnx"))
    first, second = (embed_path(embedder, tmp_path / "photos") for embedder in embedders)
    loaded = load_encoder(file)
    with torch.no_grad():
        expected = loaded(loaded.preprocess([tmp_path / "photos" / name for name in first.names])).numpy()
    np.testing.assert_allclose(first.features, expected, atol=1e-5)
    np.testing.assert_allclose(second.features, expected, atol=1e-5)


@pytest.mark.parametrize(("backend", "other"), [("torch", "onnx"), ("onnx", "torch")])
def test_a_missing_package_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, backend: str, other: str) -> None:
    monkeypatch.setattr("fedssl.embedding.embedder.find_spec", lambda name: None)
    with pytest.raises(InputError, match=f"pip install .*, or set backend={other}"):
        load_embedder(run, backend=backend)


def test_a_missing_onnx_file_names_the_command(run: Path) -> None:
    with pytest.raises(InputError, match=f"fedssl-export run={run} format=onnx"):
        load_embedder(run, backend="onnx")
