"""Preprocessing: the pixels of training, from tensors, images of Pillow, and the exports' own descriptions."""

import io
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import timm
import torch
import torchvision.transforms.functional as TF
from PIL import Image

from fedssl.datasets.decoding import Decoding
from fedssl.datasets.raster import pixel_metadata, unit_values
from fedssl.errors import InputError
from fedssl.export import Preprocess, load_encoder
from fedssl.export.formats import export
from fedssl.export.huggingface import model_card
from fedssl.export.source import ExportSource
from tests.fedssl.datasets.made import encoded
from tests.fedssl.export.test_encoder_file import METADATA, save
from tests.fedssl.export.test_formats import VIT, source_of

PLAIN = Preprocess(size=8, mean=(0.0,) * 3, std=(1.0,) * 3)
GRAY = Preprocess(size=2, mean=(0.0,), std=(1.0,))


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


def drawn(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels_of(image: Image.Image) -> torch.Tensor:
    return torch.tensor(np.asarray(image)).permute(2, 0, 1)


def trained_on(content: bytes, *, size: int, channels: int = 3) -> torch.Tensor:
    """Return the pixels of training, in [0, 1]."""
    return unit_values(torch.tensor(Decoding(channels=channels, size=size)(content)))


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (9, 20), (5, 6), (1, 1000), (8, 8)])
def test_images_of_any_shape_have_the_pixels_of_training(shape):
    image = drawn(*shape)
    expected = trained_on(encoded(image), size=8)
    assert torch.equal(PLAIN(image)[0], expected)
    # Pillow rounds to integers twice, by at most a half.
    torch.testing.assert_close(PLAIN(pixels_of(image)[None])[0], expected, rtol=0, atol=1.001 / 255)


def test_images_of_pillow_are_upright_converted_and_unchanged():
    exif = Image.Exif()
    exif[0x0112] = 6  # the stored image must be turned by 90 degrees clockwise
    turned = encoded(Image.fromarray(np.array([[10, 20], [30, 40]], np.uint8)).convert("RGB"), exif=exif)
    transparent = encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 0)))
    deep = encoded(Image.fromarray(np.array([[0, 4095], [4095, 0]], np.uint16)))
    for content in (turned, transparent, deep):
        image = opened(content)
        for _ in range(2):
            assert torch.equal(GRAY(image)[0], trained_on(content, size=2, channels=1))
    assert GRAY(opened(turned)).mul(255).round().tolist() == [[[[30, 10], [40, 20]]]]


def test_a_file_has_the_dtype_of_training(tmp_path: Path):
    Image.fromarray(np.array([[0, 300], [511, 65535]], np.uint16)).save(tmp_path / "deep.png")
    settings = pixel_metadata({"dtype": "uint8"})
    preprocess = load_encoder(save(tmp_path / "encoder.pt", metadata=METADATA | settings)).preprocess
    deep = Preprocess(2, (0.0,), (1.0,), dtype=preprocess.dtype)(tmp_path / "deep.png")
    assert (deep * 255).tolist() == [[[[0, 1], [1, 255]]]]


def test_settings_of_the_pixels_are_those_of_training(tmp_path: Path):
    settings = {"background": 0, "window": [-5, 4095], "size": 8}
    file = save(tmp_path / "encoder.pt", metadata=METADATA | pixel_metadata(settings))
    preprocess = load_encoder(file).preprocess
    assert (preprocess.background, preprocess.window) == (0, [-5, 4095])
    assert pixel_metadata({"background": 255, "window": None}) == pixel_metadata({}) == {}
    save(file, metadata={"dataset.background": 256})
    with pytest.raises(InputError, match="dataset.background=256 must be at most 255"):
        load_encoder(file)


def test_pages_are_the_channels_of_an_encoder_of_as_many(tmp_path: Path):
    values = np.random.default_rng(0).integers(0, 65536, (5, 6, 6), dtype=np.uint16)
    preprocess = Preprocess(size=6, mean=(0.0,) * 5, std=(1.0,) * 5)
    for name, options in (("pages.tif", {}), ("bands.tif", {"photometric": "minisblack", "planarconfig": "separate"})):
        tifffile.imwrite(tmp_path / name, values, **options)
        assert torch.equal(preprocess(tmp_path / name), torch.tensor(values / 65535, dtype=torch.float32)[None])
    tifffile.imwrite(tmp_path / "more.tif", values.repeat(2, axis=0))
    with pytest.raises(InputError, match="10 pages of 1 channel"):
        preprocess(tmp_path / "more.tif")


@pytest.mark.parametrize(
    ("settings", "stated"),
    [
        ({}, "Pixels of 8 bits are divided by 255, those of 16 bits by 65,535. Then the mean"),
        ({"window": [0, 4095]}, "Values of more than 8 bits are scaled from [0, 4095] of an image to [0, 1], and"),
        ({"percentiles": [1, 99]}, "are scaled from the percentiles [1, 99] of an image to [0, 1], and others"),
    ],
    ids=["bytes", "window", "percentiles"],
)
def test_model_cards_state_the_scaling(tmp_path: Path, settings: dict[str, Any], stated: str):
    file = save(tmp_path / "encoder.pt", metadata=METADATA | pixel_metadata(settings))
    assert stated in model_card(ExportSource.read(file), in_timm=False)


def test_percentiles_of_tensors_are_those_of_files(tmp_path: Path):
    values = np.random.default_rng(0).normal(size=(2, 50, 50)).astype(np.float32)
    values[:, :3] = np.nan
    preprocess = replace(GRAY, percentiles=(10, 90))
    (black,) = preprocess.scaled(torch.from_numpy(values[:1, None, :3]))
    assert not black.any()
    mostly = np.zeros((1, 1, 20, 20), np.uint16)
    mostly[..., :2, :2] = 900  # 1% of the pixels: both percentiles are 0
    file = tmp_path / "mostly.png"
    Image.fromarray(mostly[0, 0]).save(file)
    assert torch.equal(replace(preprocess, size=20)(torch.from_numpy(mostly)), replace(preprocess, size=20)(file))
    for number, scaled in enumerate(preprocess.scaled(torch.from_numpy(values[:, None]))):
        low, high = np.percentile(values[number, 3:].reshape(-1), (10, 90))
        expected = np.nan_to_num((values[number].astype(np.float64) - low) / (high - low)).clip(0, 1)
        assert np.abs(scaled[0].numpy() - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(2, 3, 16, 16), r"torch.float32 of shape \(2, 3, 16, 16\), .* \(255 \* images\).round\(\)"),
        (
            torch.zeros(2, 1, 16, 16, dtype=torch.uint8),
            r"torch.uint8 or torch.uint16 of shape \(batch, 3, height, width\)",
        ),
        (torch.zeros(16, 16, dtype=torch.uint8), r"torch.uint8 of shape \(16, 16\)"),
        (
            np.zeros((16, 16, 3), np.uint8),
            r"array of uint8 and shape \(16, 16, 3\), .*; convert it with torch.from_numpy\(images\).movedim\(-1, -3\)",
        ),
        ([], "images are an empty list, .*; give one image or more"),
    ],
    ids=["float", "gray", "no channels", "NumPy", "empty"],
)
def test_other_images_are_refused(images, message):
    with pytest.raises(InputError, match=message):
        PLAIN(images)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    broken = tmp_path / "broken.png"
    broken.write_text("no image")
    with pytest.raises(InputError, match=r"broken.png cannot be read \(it is no image of .*\); give another file"):
        PLAIN([broken])
    with pytest.raises(InputError, match=r"gone.png cannot be read \(No such file or directory\)"):
        PLAIN(str(tmp_path / "gone.png"))


SIZE = 32


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """An encoder, and its Hugging Face folder, which timm loads."""
    folder = tmp_path_factory.mktemp("exported")
    source = source_of(folder, {**VIT, "size": SIZE, "patch": 8})
    export(source, "huggingface", folder / "hub")
    return source.encoder, folder / "hub"


def photo(*box: int) -> Image.Image:
    package = find_spec("sklearn")
    return Image.open(Path(package.submodule_search_locations[0]) / "datasets/images/china.jpg").crop(box)


@pytest.mark.parametrize(
    ("image", "largest", "mean"),
    [
        (photo(0, 0, 256, 128), 1.001, 1),  # scaled to 64 x 32: nothing is rounded but pixels
        (photo(0, 0, 640, 427), 50, 5),  # 47.96 x 32
        (photo(0, 0, 300, 427), 100, 12),  # 32 x 45.5
    ],
    ids=["even", "wide", "high"],
)
def test_exports_describe_the_geometry_of_training(exported, image, largest, mean):
    """Other programs round the scaled sides and the margin, which moves an image by at most a scaled pixel."""
    encoder, folder = exported
    means, stds = (torch.tensor(values).view(3, 1, 1) for values in (encoder.mean, encoder.std))
    trained = (trained_on(encoded(image), size=SIZE) - means) / stds
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    by_timm = timm.data.create_transform(**timm.data.resolve_model_data_config(model))(image)
    form = json.loads((folder / "preprocessor_config.json").read_text())
    with torch.no_grad():
        expected = encoder(trained[None])
        for found in (by_timm, by_transformers(image, form)):
            difference = ((found - trained) * stds * 255).abs()
            assert difference.max() < largest
            assert difference.mean() < mean
            assert torch.cosine_similarity(encoder(found[None]), expected) > 0.98  # down to 0.52 of squashed images


def by_transformers(image: Image.Image, form: dict[str, Any]) -> torch.Tensor:
    """Apply the documented steps of BitImageProcessor, the class of DINOv2's models."""
    assert form["image_processor_type"] == "BitImageProcessor"
    assert all(form[f"do_{step}"] for step in ("convert_rgb", "resize", "center_crop", "rescale", "normalize"))
    bilinear = TF.InterpolationMode({2: "bilinear"}[form["resample"]])  # a number of Pillow
    scaled = TF.resize(pixels_of(image), form["size"]["shortest_edge"], bilinear)
    cropped = TF.center_crop(scaled, [form["crop_size"]["height"], form["crop_size"]["width"]])
    return TF.normalize(cropped * form["rescale_factor"], form["image_mean"], form["image_std"])


def test_pixels_are_normalized_by_mean_and_deviation():
    # 255 is 1, and (1 - 0.5) / 0.25 = 2; 0 is 0, and (0 - 0.5) / 0.25 = -2.
    images = torch.tensor([255, 0], dtype=torch.uint8).view(2, 1, 1, 1)
    assert Preprocess(size=1, mean=(0.5,), std=(0.25,))(images).flatten().tolist() == [2, -2]
