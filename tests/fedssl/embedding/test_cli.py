"""The command ``fedssl-embed``: files of features, interruptions, bad input, and a process without torch."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from fedssl.embedding import cli, embed_path, formats, load_embedder
from fedssl.embedding.embedder import Embedder
from fedssl.errors import InputError
from fedssl.export.cli import run as export
from tests.fedssl.embedding.test_embeddings import NAMES, run, write_images
from tests.fedssl.export.test_formats import VIT, write_encoder

__all__ = ["run"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_images(tmp_path / "photos", NAMES)
    return tmp_path / "photos"


def embed(run: Path, images: Path, out: Path, *others: str) -> str:
    return cli.run([f"run={run}", f"images={images}", f"out={out}", "device=cpu", *others])


def test_parquet_and_npy_hold_features_and_names(run: Path, photos: Path, tmp_path: Path) -> None:
    assert "40 images, 16 dimensions" in embed(run, photos, tmp_path / "a.parquet")
    embed(run, photos, tmp_path / "a.npy")
    expected = embed_path(load_embedder(run, device="cpu"), photos)
    table, names = pq.read_table(tmp_path / "a.parquet"), pyarrow.csv.read_csv(tmp_path / "a.csv")
    assert table["name"].to_pylist() == names["name"].to_pylist() == expected.names
    assert table["label"].to_pylist() == [name.partition("/")[0] for name in expected.names]
    assert np.array_equal(np.stack(table["embedding"].to_numpy()), expected.features)
    assert np.array_equal(np.load(tmp_path / "a.npy"), expected.features)
    assert json.loads(table.schema.metadata[b"fedssl"])["encoder"] == load_embedder(run).digest
    assert not list(tmp_path.glob(".a*"))


def test_names_in_tables_are_paths_and_no_formulas(run: Path, tmp_path: Path) -> None:
    names = ["+/-1.png", "-/@.png", "=1+2/b.png", "-/a\u202fb.png", "-/\x1b.png"]
    write_images(tmp_path / "photos", names)
    embed(run, tmp_path / "photos", tmp_path / "a.npy")
    embed(run, tmp_path / "photos", tmp_path / "a.parquet")
    table, exact = pyarrow.csv.read_csv(tmp_path / "a.csv"), pq.read_table(tmp_path / "a.parquet")
    assert sorted(exact["name"].to_pylist()) == sorted(names)
    assert {*table["name"].to_pylist()} == {"./+/-1.png", "./-/@.png", "./=1+2/b.png", "./-/a\u202fb.png", "./-/ .png"}
    assert table["file"].to_pylist() == table["name"].to_pylist()
    assert "'=1+2" in table["label"].to_pylist()
    assert [label.removeprefix("'") for label in table["label"].to_pylist()] == exact["label"].to_pylist()


class Interrupted:
    """Interrupts the third block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
        self.calls, compute = 0, Embedder.__call__

        def call(embedder: Embedder, images: np.ndarray) -> np.ndarray:
            self.calls += 1
            if self.calls == last:
                raise KeyboardInterrupt
            return compute(embedder, images)

        monkeypatch.setattr(Embedder, "__call__", call)
        monkeypatch.setattr(Embedder, "batch_size", 8)


@pytest.fixture
def interrupted(run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    calls = Interrupted(monkeypatch, last=3)
    with pytest.raises(KeyboardInterrupt, match="after 16 of 40; the same command continues"):
        embed(run, photos, tmp_path / "a.npy")
    assert not (tmp_path / "a.npy").exists()
    calls.calls = 100
    return calls


def test_the_same_command_continues(run: Path, photos: Path, tmp_path: Path, interrupted: Interrupted) -> None:
    embed(run, photos, tmp_path / "a.npy")
    assert interrupted.calls == 103  # of the five blocks two were done
    embed(run, photos, tmp_path / "b.npy")
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


@pytest.mark.parametrize("changed", ["image", "encoder", "setting", "features"])
def test_changes_start_again(
    run: Path, photos: Path, tmp_path: Path, interrupted: Interrupted, changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    if changed == "image":
        write_images(photos, ["cat/0.png"], size=12)
    elif changed == "encoder":
        write_encoder(run / "encoder.pt", {**VIT, "size": 8})
    elif changed == "features":
        (tmp_path / ".a.npy.partial" / "features").write_bytes(b"cut")
    embed(run, photos, tmp_path / "a.npy", *(["dataset.background=0"] if changed == "setting" else []))
    assert interrupted.calls == 105
    assert ("have changed" in caplog.text) == (changed != "features")


def test_skipping_damaged_images_computes_nothing_again(run: Path, photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "3.png").write_bytes((photos / "cat" / "3.png").read_bytes()[:100])
    with pytest.raises(InputError, match=r"1 of 40 images cannot be read: cat/3.png .*skip_unreadable=true"):
        embed(run, photos, tmp_path / "a.parquet")
    assert not (tmp_path / "a.parquet").exists()
    text = embed(run, photos, tmp_path / "a.parquet", "skip_unreadable=true")
    assert text.endswith("39 images, 16 dimensions")  # without a speed
    assert "cat/3.png" not in pq.read_table(tmp_path / "a.parquet")["name"].to_pylist()


def test_an_image_that_is_readable_again_is_embedded(run: Path, photos: Path, tmp_path: Path) -> None:
    """On a share that was offline for a moment, a file has the same size and time."""
    file = photos / "cat" / "3.png"
    content, time = file.read_bytes(), file.stat().st_mtime_ns
    file.write_bytes(bytes(len(content)))
    os.utime(file, ns=(time, time))
    with pytest.raises(InputError, match="1 of 40 images cannot be read: cat/3.png"):
        embed(run, photos, tmp_path / "a.npy")
    file.write_bytes(content)
    os.utime(file, ns=(time, time))
    assert "40 images" in embed(run, photos, tmp_path / "a.npy")
    embed(run, photos, tmp_path / "b.npy")
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_folders_whose_names_are_not_utf_8(run: Path, photos: Path, tmp_path: Path) -> None:
    (photos / "cat").rename(os.fsdecode(os.fsencode(photos) + b"/caf\xe9"))
    embed(run, photos, tmp_path / "a.parquet", "dataset.group=folder")
    columns = pq.read_table(tmp_path / "a.parquet").to_pydict()
    assert {"caf\\xe9"} <= set(columns["label"])
    assert {"caf\\xe9"} <= set(columns["group"])


def test_the_graph_of_another_encoder_is_refused(run: Path) -> None:
    export([f"run={run}", "format=onnx"])
    os.utime(run / "encoder.onnx", (0, 0))  # as after a copy, which may write the graph first
    load_embedder(run, backend="onnx")
    write_encoder(run / "encoder.pt", {**VIT, "size": 8, "width": 16})
    with pytest.raises(
        InputError, match=f"is the export of another encoder.pt; .* fedssl-export run={run} format=onnx"
    ):
        load_embedder(run, backend="onnx")


def test_a_call_that_ends_between_names_and_features_continues(
    run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.npy"
    write = formats.atomic_write

    def stop(file: Path, content: Callable[[BinaryIO], None]) -> None:
        if file == out:
            raise KeyboardInterrupt
        write(file, content)

    monkeypatch.setattr(formats, "atomic_write", stop)
    with pytest.raises(KeyboardInterrupt):
        embed(run, photos, out)
    monkeypatch.setattr(formats, "atomic_write", write)
    assert out.with_suffix(".csv").exists()
    embed(run, photos, out)
    assert len(np.load(out)) == len(out.with_suffix(".csv").read_text().splitlines()) - 1


def test_wrong_images_end_the_first_block(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Embedder, "batch_size", 8)
    (tmp_path / "photos").mkdir()
    for number in range(20):
        np.save(tmp_path / "photos" / f"{number:02}.npy", np.zeros((9, 9, 5), np.uint8))
    message = r"8 of 20 images cannot be read: 00.npy \(it has 5 channels but the encoder's channels=3\)"
    with pytest.raises(InputError, match=message):
        embed(run, tmp_path / "photos", tmp_path / "a.npy")
    assert not list(tmp_path.glob(".a*"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["images={photos}/none"], "images: .*none is not a folder, a file or a pattern"),
        (["images={here}/empty"], "holds no image"),
        (["images={here}/{{0..3}}.png"], "images=.* names 4 files or patterns, of which 4 match no file"),
        (["out={here}"], "does not end in .parquet, .npy"),
        (["out={here}/a.txt"], "does not end in .parquet, .npy"),
        (["out={here}/none/a.npy"], "a folder that does not exist"),
        (["out={photos}/a.npy"], "is inside of images="),
        (["out={here}/old.npy"], "old.csv exists already"),
        (["out={here}/a.lance"], r"needs lancedb; .* --extra lancedb, or pip install 'fedssl\[lancedb\]'"),
        (["out={here}/a.faiss"], r"needs faiss; .* --extra faiss, or pip install 'fedssl\[faiss\]'"),
        (["backend=tf"], "choose one of torch, onnx"),
        (["skip_unreadable=1"], "choose skip_unreadable=true or skip_unreadable=false"),
        (["imges=x"], "imges=x has no effect on fedssl-embed.*images"),
        (["dataset.size=32"], "dataset.size has no effect here"),
        (["dataset.pages=some"], "dataset.pages=some must be"),
        (["dataset.folders=owner/class"], "dataset.folders=owner/class needs subfolders"),
        (["encoder={run}/encoder.pt"], "give either run=DIR, the folder of a finished run, or encoder=FILE"),
        (["out="], "out= has no value"),
        (["run={here}/empty"], "encoder.pt does not exist"),
        (["images={here}/list.csv"], "do not exist.*dataset.skip_missing=true"),
        (["images={here}/good.csv", "dataset.label=species"], "dataset.label=species but no image"),
    ],
)
def test_bad_input(run: Path, photos: Path, tmp_path: Path, words: list[str], told: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "old.csv").touch()
    (tmp_path / "list.csv").write_text("path,label\nphotos/cat/1.png,a\nnone.png,b\n")
    (tmp_path / "good.csv").write_text("path\nphotos/cat/1.png\n")
    given = {"run": f"run={run}", "images": f"images={photos}", "out": f"out={tmp_path}/a.npy"}
    filled = [word.format(here=tmp_path, photos=photos, run=run) for word in words]
    given |= {word.partition("=")[0]: word for word in filled}
    with pytest.raises(InputError, match=told):
        cli.run(list(given.values()))
    assert not list(tmp_path.glob("a.*"))


WITHOUT_TORCH = """
import sys
from collections.abc import Callable
class Block:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "torchvision"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Block())
from fedssl.command_line import fedssl_embed
try:
    fedssl_embed()
finally:
    lines = open("/proc/self/status").read().splitlines()
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024)
"""


@pytest.mark.heavy  # the test of fedssl-classify without torch embeds, too
def test_onnx_runtime_needs_no_torch(run: Path, photos: Path, tmp_path: Path) -> None:
    embed(run, photos, tmp_path / "torch.npy")
    export([f"run={run}", "format=onnx"])
    delivered = tmp_path / "delivered.onnx"
    shutil.copy(run / "encoder.onnx", delivered)
    options = [f"encoder={delivered}", f"images={photos}", f"out={tmp_path / 'onnx.npy'}", "backend=onnx"]
    ended = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *options], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.splitlines()[-1]) < 500  # MB
    np.testing.assert_allclose(np.load(tmp_path / "onnx.npy"), np.load(tmp_path / "torch.npy"), atol=1e-5)


def test_a_damaged_graph_is_named(run: Path, photos: Path, tmp_path: Path) -> None:
    (run / "encoder.onnx").write_bytes(b"graph")
    with pytest.raises(InputError, match="encoder.onnx is damaged, or no encoder"):
        embed(run, photos, tmp_path / "a.npy", "backend=onnx")
