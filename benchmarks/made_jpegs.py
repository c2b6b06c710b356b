"""Made JPEGs of 224 x 224 pixels, as many as in ImageNet, without the hours that encoding them would take.

Images of Tiny ImageNet or CIFAR-10 are enlarged, noise is added, and a pool of them is encoded with a restart marker
after every row of blocks. Between two markers a JPEG can be decoded alone. A made image takes each of its 14 rows of
blocks from a random image of the pool, so that all have bytes and pixels of their own.
"""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SIZE, POOL, QUALITY, NOISE = 224, 2000, 75, 6.0
CLASSES, SHARD = 1000, 100_000
_RESTART = re.compile(rb"(?<=\xff[\xd0-\xd7])")  # after a marker, which no encoded pixels contain


class JpegMaker:
    """Maker of JPEGs from the images of a parquet file with a column ``image`` or ``img``."""

    def __init__(self, source: Path, *, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        table = pq.read_table(source)
        column = table.column("image" if "image" in table.schema.names else "img")
        originals = [column[number].as_py()["bytes"] for number in range(min(POOL, len(column)))]
        pool = [self._encode(original) for original in originals]
        self._head = pool[0][0]
        self._rows = [rows for _, rows in pool]

    def __call__(self) -> bytes:
        """Return another image."""
        chosen = self._random.integers(0, len(self._rows), len(self._rows[0])).tolist()
        return self._head + b"".join(self._rows[image][row] for row, image in enumerate(chosen))

    def _encode(self, original: bytes) -> tuple[bytes, list[bytes]]:
        """Return the header, and the rows of blocks, of an image that is enlarged and noisy."""
        image = Image.open(io.BytesIO(original)).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        pixels = np.asarray(image) + self._random.normal(0, NOISE, (SIZE, SIZE, 3))
        stream = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
            stream, "JPEG", quality=QUALITY, restart_marker_rows=1
        )
        encoded = stream.getvalue()
        scan = encoded.index(b"\xff\xda")
        begin = scan + 2 + int.from_bytes(encoded[scan + 2 : scan + 4], "big")
        return encoded[:begin], _RESTART.split(encoded[begin:])


def write_arrow(folder: Path, maker: JpegMaker, count: int) -> int:
    """Write ``count`` images into arrow files of ``datasets``, for `dataset.path`; return their size in bytes."""
    schema = pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()})
    random, num_bytes = np.random.default_rng(1), 0
    for number, start in enumerate(range(0, count, SHARD)):
        file = folder / f"train-{number:02d}.arrow"
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for size in _chunks(min(SHARD, count - start)):
                rows = [{"bytes": maker(), "path": None} for _ in range(size)]
                labels = random.integers(0, CLASSES, size)
                writer.write_batch(pa.record_batch([pa.array(rows, schema[0].type), pa.array(labels)], schema=schema))
        num_bytes += file.stat().st_size
    return num_bytes


def write_folder(folder: Path, maker: JpegMaker, count: int) -> None:
    """Write ``count`` image files into ten subfolders, as `ImageFolder` reads them."""
    for number in range(count):
        file = folder / f"class{number % 10}" / f"{number:06d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(maker())


def _chunks(count: int, size: int = 1000) -> Iterator[int]:
    """Yield sizes of parts of at most ``size``."""
    return (min(size, count - start) for start in range(0, count, size))
