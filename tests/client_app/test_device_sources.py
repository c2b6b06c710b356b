"""A device trains on every kind of image source, by the same reader as a simulation."""

import errno
import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydicom.data
import pytest
import tifffile
from PIL import Image

from client_app import worker
from client_app.edge_client import EdgeClient
from fedssl.datasets import cache, storage
from fedssl.datasets import pages as opened_files
from fedssl.wire.messages import ClientUpdate
from tests.client_app.test_edge_client import ask, context, plan  # noqa: F401, a fixture
from tests.devices import write_images

VALUES = np.random.default_rng(0).integers(0, 256, (6, 16, 16), dtype=np.uint8)
PNGS = []
for values in VALUES:
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "PNG")
    PNGS.append(stream.getvalue())


def tar(folder: Path) -> Path:
    with tarfile.open(folder / "shard-000.tar", "w") as archive:
        for number, content in enumerate(PNGS):
            member = tarfile.TarInfo(f"{number}.png")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return folder / "shard-000.tar"


def npz(folder: Path) -> Path:
    np.savez(folder / "data.npz", train_images=VALUES)
    return folder / "data.npz"


def parquet(folder: Path) -> Path:
    pq.write_table(pa.table({"image": PNGS}), folder / "data.parquet")
    return folder / "data.parquet"


def volume(folder: Path) -> Path:
    np.save(folder / "volume.npy", VALUES[..., None])
    return folder


def pages(folder: Path) -> Path:
    for number, image in enumerate(VALUES):
        tifffile.imwrite(folder / f"{number}.tif", image.astype(np.uint16) * 257)
    return folder


def dicom(folder: Path) -> Path:
    for number in range(6):
        (folder / f"IM{number:04}").write_bytes(Path(pydicom.data.get_testdata_file("CT_small.dcm")).read_bytes())
    return folder


@pytest.mark.parametrize("write", [tar, npz, parquet, volume, pages, dicom])
def test_a_device_trains_on_it(write, plan, tmp_path):  # noqa: F811, the fixture
    (tmp_path / "images").mkdir()
    node = {"data_path": write(tmp_path / "images"), "state_path": tmp_path / "states", "client_name": "a"}
    client = EdgeClient.read(context(**node).node_config)
    assert (client.node_info.num_images, client.node_info.problem) == (6, "")
    before = client.images_digest()
    reply = ask(plan, context(**node))
    assert not reply.has_error(), reply.error.reason
    assert ClientUpdate.from_content(reply.content, 0).num_examples == 6
    assert client.images_digest() == before


@pytest.mark.parametrize("cached", [False, True])
def test_failed_files_are_read_once_they_are_available(cached, plan, tmp_path, monkeypatch):  # noqa: F811, the fixture
    """A share that was offline for a while, and a missing permission, change no file."""
    monkeypatch.setattr(cache, "MIN_SECONDS_TO_CACHE", 0 if cached else 1e9)
    images = write_images(tmp_path / "images", 6)
    node = context(data_path=images, state_path=tmp_path / "states", client_name="a")
    read = opened_files.open_regular_file
    (images / "damaged.png").write_bytes(PNGS[0][:40])

    def fail(file, **limits):
        if Path(file).name >= "03":
            raise OSError(errno.EIO, "Input/output error", str(file))
        return read(file, **limits)

    def num_examples() -> int | None:
        reply = ask(plan, node)
        assert not reply.has_error(), reply.error.reason
        return ClientUpdate.from_content(reply.content, 0).num_examples

    for module in (opened_files, storage):
        monkeypatch.setattr(module, "open_regular_file", fail)
    assert (num_examples(), num_examples()) == (3, 3)
    for module in (opened_files, storage):
        monkeypatch.setattr(module, "open_regular_file", read)
    assert num_examples() == 6
    (before,) = worker._workers.values()
    assert num_examples() == 6
    assert [*worker._workers.values()] == [before]  # a damaged image does not make it read all again
