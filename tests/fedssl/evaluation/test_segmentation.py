"""Linear segmentation by hand, against slow transcriptions and scikit-learn, and its masks."""

import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import ExifTags, Image
from sklearn.metrics import jaccard_score
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from fedssl.datasets.base import forget_images
from fedssl.datasets.decoding import Decoding
from fedssl.encoders import conv_small, torchvision, torchvision_networks
from fedssl.encoders.factory import vit
from fedssl.encoders.library import LibraryEncoder, Parts
from fedssl.encoders.tokens import TokenEncoder
from fedssl.errors import InputError
from fedssl.evaluation.protocol import EvaluationInput, evaluate, make_evaluation_input
from fedssl.evaluation.scores import num_test_images, units_of
from fedssl.evaluation.segmentation import (
    FeatureMap,
    Segmentation,
    _displayed_size,
    _open_mask,
    _scores,
    class_counts,
    confusion,
    read_masks,
)
from tests.fedssl.datasets.made import encoded, png, png_chunk, settings_of, tiff


def scene(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """An image of 20 x 16 pixels whose left side is dark (class 0) and whose right side is bright (class 7)."""
    edge = 6 + seed % 5
    mask = np.zeros((16, 20), np.uint8)
    mask[:, edge:] = 7
    mask[:, edge : edge + 1] = 255  # ignored
    noise = np.random.default_rng(seed).integers(0, 30, (16, 20))
    return (noise + 200 * (mask > 0)).astype(np.uint8), mask


def write(folder: Path, *, count: int = 6, mask_of=scene) -> EvaluationInput:
    for split in ("train", "test"):
        for seed in range(count):
            image, mask = scene(seed)[0], mask_of(seed)[1]
            for kind, content in (("images", png(Image.fromarray(image))), ("masks", png(Image.fromarray(mask)))):
                (folder / kind / split).mkdir(parents=True, exist_ok=True)
                (folder / kind / split / f"{seed}.png").write_bytes(content)
    return subject_of(folder / "images")


def subject_of(path: Path, **changes: object) -> EvaluationInput:
    forget_images()
    torch.manual_seed(0)
    settings = {"path": str(path), "folders": "none", "label": None, "size": 16, "channels": 1}
    data = settings_of("folder", **settings, mean=[0.5], std=[0.25], **changes)
    encoder = conv_small(channels=1, size=16, width=4)
    subject = make_evaluation_input(encoder, data, device=torch.device("cpu"), needs_labels=False)
    assert subject is not None
    return subject


def test_class_counts_equal_a_slow_loop():
    masks = torch.randint(0, 4, (3, 7, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    classes = torch.tensor([0, 3], dtype=torch.uint8)  # 1 and 2 do not count
    expected = torch.zeros(3, 3, 3, 2)
    for image in range(3):
        for row in range(7):
            for column in range(7):
                for number, name in enumerate(classes):
                    if masks[image, row, column] == name:
                        expected[image, row * 3 // 7, column * 3 // 7, number] += 1
    assert torch.equal(class_counts(masks, 3, classes), expected.view(-1, 2))


def test_iou_by_hand_and_by_scikit_learn():
    # Pixels (true, predicted): 0 0, 0 0, 0 1, 1 1, 2 1. IoU of 0: 2 of 3, of 1: 1 of 3, of 2: 0 of 1; 3 of 5 are right.
    true, predicted = torch.tensor([0, 0, 0, 1, 2]).byte(), torch.tensor([0, 0, 1, 1, 1]).byte()
    scores = _scores(confusion(predicted, true), num_images=1)
    assert scores["segmentation_miou"].parts == pytest.approx({"0": 2 / 3, "1": 1 / 3, "2": 0})
    assert scores["segmentation_miou"].value == pytest.approx(1 / 3)
    assert scores["segmentation_pixel_accuracy"].value == pytest.approx(3 / 5)
    expected = jaccard_score(true, predicted, average="macro")
    assert scores["segmentation_miou"].value == pytest.approx(expected)


def test_masks_have_the_square_of_their_images(tmp_path: Path):
    subject = write(tmp_path)
    for mask in (tmp_path / "masks").rglob("*.png"):
        mask.with_suffix(".xml").write_text("outlines of the same image")
    masks = read_masks(subject.train, str(tmp_path / "masks"))
    assert masks.shape == (6, 16, 16)
    for number in range(6):  # 20 x 16: the square are the columns 2 to 17, which are not scaled
        assert torch.equal(masks[number], torch.from_numpy(scene(number)[1][:, 2:18]))
    few = subject.train.subset(torch.tensor([3, 1]))
    assert torch.equal(read_masks(few, str(tmp_path / "masks")), masks[[3, 1]])
    halves = subject.test.subset(torch.tensor([3, 1]))
    with pytest.raises(InputError, match="'y' does not exist|has no column 'y'"):
        read_masks(halves, "y")


def test_both_sides_are_found_from_folders_and_columns(tmp_path: Path):
    subject = write(tmp_path)
    protocol = Segmentation(masks=str(tmp_path / "masks"))
    protocol.validate(subject, feature_dim=4)
    scores = protocol(subject, seed=0)
    assert units_of(scores) == protocol.result_units(0)
    assert set(scores["segmentation_miou"].parts) == {"0", "7"}
    assert scores["segmentation_pixel_accuracy"].value > 0.8
    for split in ("train", "test"):
        scenes = [scene(seed) for seed in range(6)]
        scenes = [(png(Image.fromarray(image)), png(Image.fromarray(mask))) for image, mask in scenes]
        rows = [{"image": {"bytes": image}, "mask": {"bytes": mask}} for image, mask in scenes]
        (tmp_path / "table").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table" / f"{split}.parquet")
    of_table = subject_of(tmp_path / "table", image="image")
    assert Segmentation(masks="mask")(of_table, seed=0) == scores


def png_of_bits(mask: np.ndarray, bits: int) -> bytes:
    """A gray PNG whose values have 1, 2, 4 or 8 bits; its width is a multiple of 8."""
    places = mask[..., None] >> np.arange(bits)[::-1] & 1
    lines = np.packbits(places.reshape(len(mask), -1).astype(np.uint8), axis=1)
    content = zlib.compress(b"".join(b"\0" + line.tobytes() for line in lines))
    header = struct.pack(">IIBBBBB", mask.shape[1], len(mask), bits, 0, 0, 0, 0)
    chunks = (png_chunk(b"IHDR", header), png_chunk(b"IDAT", content), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff_of_bits(mask: np.ndarray, bits: int) -> bytes:
    if bits == 1:
        return tiff(mask.astype(bool), photometric="minisblack")
    return tiff(mask, photometric="minisblack", bitspersample=bits)


def pgm_of_bits(mask: np.ndarray, bits: int) -> bytes:
    return b"P5 %d %d %d\n" % (mask.shape[1], len(mask), 2**bits - 1) + mask.tobytes()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("form", [png_of_bits, tiff_of_bits, pgm_of_bits])
def test_masks_of_few_bits_keep_their_classes(form: Callable[[np.ndarray, int], bytes], bits: int):
    mask = (np.arange(64).reshape(8, 8) % 2**bits).astype(np.uint8)
    found = _open_mask({"bytes": form(mask, bits)}, Decoding(channels=3, size=8))
    np.testing.assert_array_equal(np.asarray(found), mask)


def turned(form: str, values: np.ndarray, orientation: int) -> bytes:
    """An image file with an EXIF orientation."""
    if form == "tifffile":
        return tiff(values, photometric="rgb", planarconfig="contig", extratags=[(274, "H", 1, orientation, True)])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    if form != "16-bit PNG":
        return encoded(Image.fromarray(values.astype(np.uint8)), form, exif=exif)
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    header = struct.pack(">IIBBBBB", values.shape[1], len(values), 16, 2, 0, 0, 0)
    chunks = {b"IHDR": header, b"eXIf": exif.tobytes().removeprefix(b"Exif\0\0"), b"IDAT": zlib.compress(lines)}
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in {**chunks, b"IEND": b""}.items())


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("form", "dtype", "channels"),
    [
        ("JPEG", "uint8", 3),
        ("PNG", "uint8", 3),
        ("16-bit PNG", "uint16", 3),
        ("TIFF", "uint8", 3),
        ("tifffile", "uint8", 3),
        ("tifffile", "uint16", 3),
        ("tifffile", "uint8", 5),
    ],
)
def test_masks_have_the_size_of_turned_images(form: str, dtype: str, channels: int, orientation: int):
    values = np.zeros((4, 6, channels), dtype)
    size = _displayed_size(turned(form, values, orientation), Decoding(channels=channels, size=4))
    assert size == ((4, 6) if orientation > 4 else (6, 4))


@pytest.mark.parametrize(
    ("orientation", "expected"),
    [(2, [[3, 2, 1], [6, 5, 4]]), (3, [[6, 5, 4], [3, 2, 1]]), (6, [[4, 1], [5, 2], [6, 3]])],
)
def test_masks_are_turned_upright(orientation: int, expected: list[list[int]]):
    content = turned("PNG", np.array([[1, 2, 3], [4, 5, 6]]), orientation)
    found = _open_mask({"bytes": content}, Decoding(channels=3, size=4))
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16"])
def test_tiff_masks_with_inverted_gray_are_refused(dtype: str):
    content = tiff(np.array([[0, 1], [2, 3]]).astype(dtype), photometric="miniswhite")
    with pytest.raises(InputError, match="white is 0 in this TIFF"):
        _open_mask({"bytes": content}, Decoding(channels=3, size=2))
    bits = np.array([[False, True]])
    content = tiff(bits, photometric="minisblack")
    np.testing.assert_array_equal(np.asarray(_open_mask({"bytes": content}, Decoding(channels=3, size=2))), bits)


@pytest.mark.parametrize(
    ("mask_of", "message"),
    [
        (lambda seed: (None, np.zeros((16, 20), np.uint8)), "a single class in training images"),
        (lambda seed: (None, np.full((16, 20), 255, np.uint8)), "set evaluation.ignore_index=null if 255 is a class"),
        (lambda seed: (None, np.zeros((8, 10), np.uint8)), "has 10 x 8 pixels, but the image has 20 x 16; save masks"),
        (lambda seed: (None, np.zeros((16, 20, 3), np.uint8)), "it has mode RGB, but pixels are class numbers"),
        (lambda seed: (None, np.full((16, 20), 300, np.uint16)), "one class from 0 to 255 for each pixel"),
    ],
)
def test_unsuitable_masks_are_refused(tmp_path: Path, mask_of, message: str):
    subject = write(tmp_path, count=2, mask_of=mask_of)
    with pytest.raises(InputError, match=message):
        Segmentation(masks=str(tmp_path / "masks")).validate(subject, feature_dim=4)


def test_masks_with_lossy_compression_are_refused(tmp_path: Path):
    subject = write(tmp_path, count=2)
    for file in (tmp_path / "masks").rglob("*.png"):
        Image.open(file).save(file.with_suffix(".jpg"), quality=95)
        file.unlink()
    with pytest.raises(InputError, match=r"the mask of .*0.png cannot be used: it is a JPEG, .*; save masks as PNG"):
        read_masks(subject.train, str(tmp_path / "masks"))


def test_every_image_has_its_own_mask(tmp_path: Path):
    subject = write(tmp_path, count=2)
    folder = tmp_path / "masks"
    (folder / "train" / "1.png").unlink()
    with pytest.raises(InputError, match=r"no mask for 1 of 2 images .*1.png\); give each mask the name of its image"):
        read_masks(subject.train, str(folder))
    (folder / "train" / "0.jpg").write_bytes(b"a preview")
    (folder / "train" / "1.png").write_bytes((folder / "train" / "0.png").read_bytes())
    assert read_masks(subject.train, str(folder)).shape[0] == 2
    (folder / "train" / "1.tif").write_bytes((folder / "train" / "1.png").read_bytes())
    with pytest.raises(InputError, match=r"1.png, .*1.tif are masks of one image; merge them into one"):
        read_masks(subject.train, str(folder))
    # In a folder without subfolders, the masks of training and test images would be the same.
    (tmp_path / "flat").mkdir()
    (folder / "train" / "0.png").rename(tmp_path / "flat" / "0.png")
    (folder / "test" / "1.png").rename(tmp_path / "flat" / "1.png")
    with pytest.raises(InputError, match="training and test images have the same masks"):
        Segmentation(masks=str(tmp_path / "flat")).validate(subject, feature_dim=4)


def test_images_without_a_used_pixel_are_not_counted(tmp_path: Path):
    """Ignore the masks of the test images 0 and 3 of six."""

    def mask_of(seed: int) -> tuple[None, np.ndarray]:
        return None, np.full((16, 20), 255, np.uint8) if seed % 3 == 0 else scene(seed)[1]

    subject = write(tmp_path, mask_of=mask_of)
    for ignore_index, expected in ((255, 4), (None, 6)):
        protocol = Segmentation(masks=str(tmp_path / "masks"), ignore_index=ignore_index)
        scores = evaluate(protocol, subject, seed=0)
        assert num_test_images([scores]) == dict.fromkeys(protocol.result_units(0), expected)


class Tokens(type(conv_small(channels=1, size=8, width=4))):
    """An encoder whose output is the tokens 0, 1, 2, ..."""

    count = 5

    def run_stage(self, number: int, x: Tensor) -> Tensor:
        return x

    def run_stem(self, images: Tensor) -> Tensor:
        return torch.arange(float(self.count)).view(1, self.count, 1)


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_tokens_are_a_square_after_the_prefix(prefix: int):
    """With 5 prefix tokens there are 9, which are a square themselves."""
    encoder = conv_small(channels=1, size=8, width=4)
    encoder.__class__, encoder.count, encoder.num_prefix_tokens = Tokens, prefix + 4, prefix
    assert FeatureMap(encoder)(torch.zeros(1, 1, 8, 8)).tolist() == [[[[prefix, prefix + 1], [prefix + 2, prefix + 3]]]]


def test_tokens_that_are_no_square_are_refused():
    encoder = conv_small(channels=1, size=8, width=4)
    encoder.__class__ = Tokens
    with pytest.raises(InputError, match="Tokens returns 5 tokens, which are no square after num_prefix_tokens=0; set"):
        FeatureMap(encoder)(torch.zeros(1, 1, 8, 8))


def test_networks_without_stages_are_refused():
    networks = nn.Flatten(), torchvision(name="mobilenet_v3_small", channels=3, size=32)
    for network in networks:
        with pytest.raises(InputError, match="needs an encoder in stages and .* has none; choose another encoder"):
            FeatureMap(network)


def of_library(network: nn.Module, parts: Parts | None) -> LibraryEncoder:
    return LibraryEncoder(network, parts, widths=[8], features=[8], channels=3, image_size=32)


def timm_vit(**settings: object) -> LibraryEncoder:
    from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer

    from fedssl.encoders import timm_networks

    size = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 1, "num_classes": 0}
    network = TimmVisionTransformer(**size, **settings)
    return of_library(network, timm_networks.divide(network))


def torchvision_vit() -> LibraryEncoder:
    network = VisionTransformer(image_size=32, patch_size=8, num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8)
    return of_library(network, torchvision_networks.divide(network))


def own_vit(**settings: object) -> nn.Module:
    return vit(channels=3, size=32, patch=8, depth=1, width=8, heads=1, **settings)


@pytest.mark.parametrize(
    ("make", "prefix"),
    [
        (partial(own_vit, registers=8), 9),  # as 16 patches and 9 others, 25 tokens are a square, too
        (partial(own_vit, registers=9, pool="mean"), 9),
        (partial(own_vit, registers=4), 5),
        (partial(timm_vit, reg_tokens=8), 9),
        (partial(timm_vit, reg_tokens=9, class_token=False, global_pool="avg"), 9),
        (torchvision_vit, 1),
    ],
)
def test_maps_of_transformers_are_their_last_16_tokens(make: Callable[[], Any], prefix: int):
    encoder, images = make().eval(), torch.rand(2, 3, 32, 32)
    assert encoder.num_prefix_tokens == prefix
    with torch.no_grad():
        if isinstance(encoder, TokenEncoder):
            tokens = encoder.forward_tokens(encoder.embed(images))
        else:
            tokens = encoder.run_stage(1, encoder.run_stem(images))
        result = FeatureMap(encoder)(images)
    assert tokens.shape[1] == prefix + 16
    assert torch.equal(result, tokens[:, -16:].transpose(1, 2).reshape(2, 8, 4, 4))
