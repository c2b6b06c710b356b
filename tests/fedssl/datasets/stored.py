"""Sixty images in every form of storage, read through a cache of the test."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from fedssl.datasets import base
from fedssl.datasets.base import ImageData
from tests.fedssl.datasets.made import encoded, settings_of

BAD = (0, 17, 40)  # no image, a truncated image, and no bytes (in a table)


def jpegs() -> list[bytes | None]:
    """Sixty images of noise, four times as large as needed, of which three cannot be read."""
    random, made = np.random.default_rng(0), []
    for number in range(60):
        shape = (100, 80, 3) if number % 3 else (70, 70)
        made.append(encoded(Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)), "JPEG"))
    for index, content in zip(BAD, (b"no image", made[BAD[1]][:2000], None), strict=True):
        made[index] = content
    return made


def write(folder: Path, kind: str) -> None:
    """Write the images in two files of 40 and 20 rows, or as files of two classes."""
    folder.mkdir()
    images = jpegs()
    if kind == "folder":
        for number, content in enumerate(images):
            file = folder / f"class{number % 2}" / f"{number:02d}.jpg"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content or b"")
        return
    binary = pa.large_binary() if kind == "large arrow" else pa.binary()
    labels = [number % 10 for number in range(60)]
    for shard, part in enumerate((slice(0, 40), slice(40, 60))):
        structs = pa.array([{"bytes": image, "path": "x"} for image in images[part]], pa.struct({"bytes": binary}))
        table = pa.table({"img": structs, "label": labels[part], "who": [f"w{n % 3}" for n in labels[part]]})
        if kind == "parquet":
            pq.write_table(table, folder / f"train-{shard}.parquet", row_group_size=9)
            continue
        options = pa.ipc.IpcWriteOptions(compression="lz4" if kind == "compressed arrow" else None)
        open_writer = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
        with open_writer(folder / f"train-{shard}.arrow", table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=11)


def load(folder: Path, kind: str, location: Path | None, split: str = "federated", **changes: object) -> ImageData:
    """Read without the data sets that this process has loaded."""
    base.forget_images()
    name, own = ("folder", {}) if kind == "folder" else ("cifar10", {"owner": "who"})
    settings = {"path": str(folder), "size": 20, "dtype": "uint8", "test_fraction": 0.2}
    settings["cache"] = location and str(location)
    result = base.load_split(settings_of(name, **settings | own | changes), split)
    assert result is not None
    return result


def only(location: Path) -> Path:
    (folder,) = location.iterdir()
    return folder


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def same(one: ImageData, other: ImageData) -> bool:
    columns = ((one.images[:], other.images[:]), (one.labels, other.labels), (one.owners, other.owners))
    names = (one.classes, one.owner_names, one.warnings) == (other.classes, other.owner_names, other.warnings)
    return names and all(a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in columns)
