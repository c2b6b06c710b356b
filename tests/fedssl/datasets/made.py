"""Data sets made by tests, and their settings."""

import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import tifffile
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from fedssl.config.settings import DataSettings
from fedssl.config.typed_settings import read_data
from fedssl.datasets.decoding import Decoding
from fedssl.datasets.image_index import Query, SequenceIndex
from fedssl.datasets.images import ImageSource

CONF = Path(__file__).parents[3] / "conf" / "dataset"
NAMES = ["digits", "cifar10", "cifar100", "tiny_imagenet", "stl10", "folder", "medmnist", "domainnet", "pacs", "svhn"]
NAMES += ["imagenet100", "mini_imagenet"]


def node_of(name: str, **changes: object) -> DictConfig:
    settings = OmegaConf.load(CONF / f"{name}.yaml")
    names = {"cifar10", "folder"}.intersection(map(str, settings.pop("defaults", ())))  # Hydra's own key
    bases = [node_of(base) for base in names]
    return OmegaConf.merge(*bases, settings, changes)


def settings_of(name: str, **changes: object) -> DataSettings:
    return read_data(node_of(name, **changes))


def query_of(split: str, **changes: object) -> Query:
    plain = {"image": None, "label": "label", "owner": None, "folders": "class", "split_folders": "auto"}
    plain |= {"group": None, "split_column": None, "skip_missing": False}
    plain |= {"test_fraction": 0.0, "decoding": Decoding(channels=3, size=4)}
    return Query(split=split, name="", **{**plain, **changes})


def make_image(value: int, *, size: tuple[int, int] = (4, 4), mode: str = "RGB") -> Image.Image:
    """An image whose pixels are ``value``, ``value + 1``, ... in every channel."""
    pixels = np.arange(value, value + size[0] * size[1], dtype=np.uint8).reshape(size[1], size[0])
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(image: Image.Image) -> bytes:
    return encoded(image)


def png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def tiff(values: np.ndarray, **options: object) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, values, **options)
    return stream.getvalue()


def table(values: list[int], labels: list[int | None], *, image: str = "img", label: str = "label") -> pa.Table:
    """Table in the Hub's format: an image is a struct of bytes and path; class names are in the metadata."""
    images = [{"bytes": png(make_image(value)), "path": None} for value in values]
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    features = {image: {"_type": "Image"}, label: {"names": ["ant", "bee", "cow"], "_type": "ClassLabel"}}
    columns = {image: pa.array(images, struct), label: pa.array(labels, pa.int64())}
    return pa.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def first_pixels(images: ImageSource | np.ndarray) -> list[int]:
    return images[:][:, 0, 0, 0].tolist()


class Batches(SequenceIndex):
    """Encoded images, as tasks of decoding threads."""

    def __init__(self, batches: list, *, channels: int, size: int) -> None:
        form = Decoding(channels=channels, size=size, dtype="uint8")
        sources = [source for batch in batches for source in batch]
        counts = {"count": len(sources), "num_in_files": len(sources)}
        super().__init__(name="", decoding=form, files=sources, key={}, images=sources, **counts)
        self.__dict__["_batches"] = batches

    def batches(self, start: int):
        return iter(self._batches)


def touch(root: Path, *names: str) -> Path:
    """Make empty files and their folders below a folder."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root
