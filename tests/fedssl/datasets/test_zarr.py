"""Arrays of Zarr as they are stored, of both versions, with shards and resolutions; and malicious ones."""

import json
import struct
import tracemalloc
import zlib
from itertools import product
from pathlib import Path

import imagecodecs
import numpy as np
import pytest

from fedssl.datasets.decoding import Decoding, Page
from fedssl.datasets.folder import read
from fedssl.datasets.pages import open_pages
from fedssl.datasets.path_index import files_digest
from fedssl.errors import InputError

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")

STACK = np.random.default_rng(0).integers(0, 60000, (5, 20, 30), dtype=np.uint16)
ENCODERS = {
    "gzip": lambda content: zlib.compress(content, wbits=31),
    "zlib": zlib.compress,
    "zstd": imagecodecs.zstd_encode,
    "blosc": imagecodecs.blosc_encode,
    "lz4": lambda content: imagecodecs.lz4_encode(content, header=True),
    "crc32c": lambda content: content + bytes(4),
}


def chunks_of(array: np.ndarray, sizes: tuple[int, ...]) -> dict[tuple[int, ...], np.ndarray]:
    """The chunks of a regular grid, those at the end filled with zeros."""
    padded = np.pad(array, [(0, -total % size) for total, size in zip(array.shape, sizes, strict=True)])
    grid = [range(total // size) for total, size in zip(padded.shape, sizes, strict=True)]
    return {
        place: padded[tuple(slice(cell * size, cell * size + size) for cell, size in zip(place, sizes, strict=True))]
        for place in product(*grid)
    }


def write(folder: Path, files: dict[str, bytes | dict[str, object]]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def write_2(
    folder: Path, array: np.ndarray, sizes: tuple[int, ...], *, codec="zstd", order="C", separator=".", **about
):
    metadata = {"zarr_format": 2, "shape": array.shape, "chunks": sizes, "dtype": array.dtype.str, "order": order}
    metadata |= {"compressor": codec and {"id": codec}, "filters": None, "fill_value": 0}
    metadata["dimension_separator"] = separator
    encode = ENCODERS.get(codec, bytes)
    chunks = {
        separator.join(map(str, key)): encode(part.tobytes(order)) for key, part in chunks_of(array, sizes).items()
    }
    return write(folder, {".zarray": metadata | about, **chunks})


def write_3(folder: Path, array: np.ndarray, sizes: tuple[int, ...], *, codecs=("zstd",), shard=None, **about: object):
    endian = {">": "big"}.get(array.dtype.byteorder, "little")
    named = [{"name": "bytes", "configuration": {"endian": endian}}, *({"name": name} for name in codecs)]
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    inner = {"chunk_shape": sizes, "codecs": named, "index_codecs": index, "index_location": "end"}
    whole = [{"name": "sharding_indexed", "configuration": inner}] if shard else named
    metadata = {"zarr_format": 3, "node_type": "array", "shape": array.shape, "data_type": array.dtype.name}
    metadata |= {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard or sizes}}, "fill_value": 0}
    metadata |= {"chunk_key_encoding": {"name": "default"}, "codecs": whole, "attributes": {}}
    files = {}
    for place, part in chunks_of(array, shard or sizes).items():
        encoded = []
        for piece in chunks_of(part, sizes).values():
            content = piece.tobytes()
            for name in codecs:
                content = bytes(ENCODERS[name](content))
            encoded.append(content if piece.any() or not shard else None)  # a shard lacks empty chunks
        content, places = b"", b""
        for chunk in encoded:
            places += struct.pack("<QQ", *((2**64 - 1,) * 2 if chunk is None else (len(content), len(chunk))))
            content += chunk or b""
        files["/".join(["c", *map(str, place)])] = content + places + bytes(4) if shard else content
    return write(folder, {"zarr.json": metadata | about, **files})


def values(folder: Path, *, channels: int = 1, **settings: int) -> np.ndarray:
    with open_pages(folder, max_pixels=10**6, channels=channels, **settings) as pages:
        return np.stack([pages.page(number).load() for number in range(pages.count)])


@pytest.mark.parametrize("sizes", [(1, 20, 30), (2, 7, 30), (5, 20, 9)])
def test_every_value_is_read(tmp_path, sizes):
    for codec in ("gzip", "zlib", "zstd", "blosc", "lz4", None):
        assert np.array_equal(values(write_2(tmp_path / f"{codec}.zarr", STACK, sizes, codec=codec))[..., 0], STACK)
    for name, settings in {"F": {"order": "F"}, "slash": {"separator": "/"}}.items():
        assert np.array_equal(values(write_2(tmp_path / f"{name}.zarr", STACK, sizes, **settings))[..., 0], STACK)
    for codecs in ((), ("gzip",), ("blosc",), ("zstd", "crc32c")):
        folder = write_3(tmp_path / f"3{'-'.join(codecs)}.zarr", STACK, sizes, codecs=codecs)
        assert np.array_equal(values(folder)[..., 0], STACK)
    assert np.array_equal(values(write_3(tmp_path / "big.zarr", STACK.astype(">u2"), sizes))[..., 0], STACK)


def test_shards_and_chunks_that_are_not_stored(tmp_path):
    array = STACK.copy()
    array[1:3, 5:10] = 0
    folder = write_3(tmp_path / "a.zarr", array, (1, 5, 15), shard=(2, 10, 30))
    assert np.array_equal(values(folder)[..., 0], array)
    (folder / "c" / "0" / "0" / "0").unlink()
    array[:2, :10] = 0  # the fill value
    assert np.array_equal(values(folder)[..., 0], array)


@pytest.mark.parametrize(
    ("shape", "channels", "count"),
    [((5, 20, 30), 1, 5), ((20, 30), 1, 1), ((2, 20, 30, 3), 3, 2), ((2, 4, 20, 30), 4, 2), ((2, 6, 20, 30), 1, 12)],
)
def test_axes_of_channels(tmp_path, shape, channels, count):
    array = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    found = values(write_2(tmp_path / "a.zarr", array, shape), channels=channels)
    assert found.shape == (count, 20, 30, channels)
    expected = array.reshape(count, 20, 30, channels) if channels in (1, 3) else np.moveaxis(array, 1, -1)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("version", [2, 3])
def test_the_lowest_sufficient_resolution_is_read(tmp_path, version):
    levels = [np.full((2, 3, 1, 80 >> level, 120 >> level), 100 * level + 7, np.uint16) for level in range(3)]
    levels_of = [{"path": f"s{number}"} for number in range(3)]
    scales = {"multiscales": [{"axes": [{"name": name} for name in "tczyx"], "datasets": levels_of}]}
    about = {".zgroup": {"zarr_format": 2}, ".zattrs": scales}
    of_3 = {"zarr.json": {"zarr_format": 3, "attributes": {"ome": scales}}}
    write(tmp_path / "a.zarr", about if version == 2 else of_3)
    for number, level in enumerate(levels):
        (write_2 if version == 2 else write_3)(tmp_path / "a.zarr" / f"s{number}", level, (1, 1, 1, 64, 64))
    for size, level in ((10, 2), (11, 1), (20, 1), (21, 0), (64, 0)):
        found = values(tmp_path / "a.zarr", channels=3, size=size)
        assert found.shape == (2, 80 >> level, 120 >> level, 3)
        assert (found == 100 * level + 7).all()


def test_a_folder_of_zarr_is_an_image_file(tmp_path):
    for name in ("cat", "dog"):
        write_3(tmp_path / "data" / name / "a.zarr", STACK, (1, 20, 30))
    settings = {"channels": 1, "size": 20, "limit": None}
    for path in (tmp_path / "data", tmp_path / "data" / "*" / "*.zarr"):
        made = read("train", path=str(path), **settings)
        assert len(made.images) == 10
    assert read("train", path=str(tmp_path / "data"), **settings).labels.tolist() == [0] * 5 + [1] * 5
    alone = read("train", path=str(tmp_path / "data" / "cat" / "a.zarr"), storage="encoded", **settings)
    expected = Decoding(channels=1, size=20)(Page(tmp_path / "data" / "dog" / "a.zarr", 3))
    assert np.array_equal(alone.images[3:4].numpy()[0], expected)
    digest = files_digest(tmp_path / "data")
    (tmp_path / "data" / "cat" / "a.zarr" / "c" / "0" / "0" / "0").write_bytes(b"changed")
    assert files_digest(tmp_path / "data") != digest
    write(tmp_path / "group.zarr", {"zarr.json": {"zarr_format": 3, "node_type": "group"}})
    with pytest.raises(InputError, match=r"it is a group without an image of OME-Zarr; set dataset.path to an array"):
        read("train", path=str(tmp_path / "group.zarr"), **settings)


BOMB = bytes(2**24)


@pytest.mark.parametrize(
    ("about", "chunk", "reason"),
    [
        ({"filters": [{"id": "pickle"}]}, None, "it has the codec pickle; save it with one of gzip"),
        ({"compressor": {"id": "__reduce__"}}, None, "it has the codec __reduce__"),
        ({"dtype": "|O"}, None, r"its values are \|O"),
        ({"shape": [2**39, 2**39, 2**39]}, None, "images, and 1,048,576 are the maximum"),
        ({"shape": [5, 2**20, 2**20]}, None, "more than dataset.max_pixels"),
        ({"chunks": [2**30, 20, 30]}, None, "an image has 1 chunks with"),
        ({"chunks": [1, 20, 0]}, None, "two to six positive integers are needed"),
        ({"shape": [True, 20, 30]}, None, "two to six positive integers are needed"),
        ({"compressor": {"id": "gzip"}}, ENCODERS["gzip"](BOMB), "a chunk has 1,201 bytes in place of 1,200"),
        ({}, bytes(ENCODERS["zstd"](BOMB)), "Destination buffer is too small"),
        ({"compressor": {"id": "blosc"}}, bytes(ENCODERS["blosc"](BOMB)), "blosc_decompress"),
        ({"compressor": {"id": "lz4"}}, bytes(ENCODERS["lz4"](BOMB)), "LZ4"),
        ({"compressor": None}, bytes(2**20), "bytes but the maximum is"),
        ({"compressor": None}, b"short", "a chunk has 5 bytes in place of 1,200"),
    ],
)
def test_malicious_arrays_are_unreadable(tmp_path, about, chunk, reason):
    folder = write_2(tmp_path / "a.zarr", STACK, (1, 20, 30), **about)
    if chunk is not None:
        (folder / "0.0.0").write_bytes(chunk)
    tracemalloc.start()
    with pytest.raises(Exception, match=reason):
        Decoding(channels=1, size=20)(folder)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


@pytest.mark.parametrize("path", ["../../b.zarr", "/etc", "", "s0/../../b"])
def test_resolutions_outside_the_folder_are_refused(tmp_path, path):
    write_2(tmp_path / "b.zarr", STACK, (1, 20, 30))
    scales = {"multiscales": [{"axes": ["z", "y", "x"], "datasets": [{"path": path}]}]}
    write(tmp_path / "a.zarr", {".zgroup": {"zarr_format": 2}, ".zattrs": scales})
    with pytest.raises(ValueError, match="its resolutions are not folders in it"):
        values(tmp_path / "a.zarr")


@pytest.mark.parametrize("places", [(0, 2**63), (2**62, 100), (10**6, 100)])
def test_places_beyond_a_shard_are_unreadable(tmp_path, places):
    folder = write_3(tmp_path / "a.zarr", STACK, (1, 20, 30), shard=(5, 20, 30))
    file = folder / "c" / "0" / "0" / "0"
    content = file.read_bytes()
    file.write_bytes(content[:-84] + struct.pack("<QQ", *places) + content[-68:])
    with pytest.raises(Exception, match=r".+"):
        values(folder)
