"""The command ``fedssl-explore``: pages of paths and of runs, files of features, sampling, bands and bad input."""

import os
import shutil
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.datasets.base import find_changes
from fedssl.datasets.folder import read
from fedssl.embedding import cli as embed_cli
from fedssl.embedding.embedder import Embedder
from fedssl.errors import InputError
from fedssl.explore import cli
from fedssl.explore.images import sample, without_folders
from fedssl.explore.run_images import RunImages
from simulation.run import run as simulate
from tests.fedssl.embedding.test_embeddings import NAMES, run, write_images
from tests.fedssl.explore.test_page import HOSTILE, data_of
from tests.fedssl.export.test_formats import SMALL, write_encoder

__all__ = ["run"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_images(tmp_path / "photos", NAMES)
    return tmp_path / "photos"


def explore(run: Path, *others: str) -> tuple[str, dict]:
    out = run.parent / "page.html"
    text = cli.run([f"run={run}", f"out={out}", "device=cpu", "projection=pca", *others])
    return text, data_of(out.read_text())


def column(data: dict, title: str) -> list[str]:
    (found,) = (each for each in data["columns"] if each["title"] == title)
    return [found["values"][code] for code in np.frombuffer(b64decode(found["codes"]), "<u4")]


def test_the_page_has_names_labels_and_neighbors(run: Path, photos: Path) -> None:
    text, data = explore(run, f"images={photos}")
    assert "40 images" in text
    assert data["names"] == sorted(NAMES)
    assert column(data, "label") == [name.partition("/")[0] for name in sorted(NAMES)]
    assert str(run.parent) not in (run.parent / "page.html").read_text()


@pytest.mark.parametrize("ending", ["parquet", "npy"])
def test_features_of_a_file_are_not_computed(
    run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    file = run.parent / f"features.{ending}"
    for name in ("-1.png", "\x1b.png"):  # which a CSV file has in another form
        (photos / "cat" / "0.png").rename(photos / name)
        write_images(photos, ["cat/0.png"])
    embed_cli.run([f"run={run}", f"images={photos}", f"out={file}", "device=cpu"])
    _, expected = explore(run, f"images={photos}")
    compute, computed = Embedder.__call__, []
    monkeypatch.setattr(
        Embedder, "__call__", lambda self, images: computed.append(len(images)) or compute(self, images)
    )
    assert explore(run, f"images={photos}", f"embeddings={file}")[1] == expected
    assert len(explore(run, f"images={photos}", f"embeddings={file}", "limit=7")[1]["names"]) == 7
    assert computed == ([8, 8] if ending == "npy" else [])  # to recognize the encoder


def test_features_of_other_images_or_encoders_are_refused(run: Path, photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "features.parquet"
    embed_cli.run([f"run={run}", f"images={photos}", f"out={file}", "device=cpu"])
    embed_cli.run([f"run={run}", f"images={photos}", f"out={file.with_suffix('.npy')}", "device=cpu"])
    np.save(tmp_path / "nan.npy", np.full((40, 16), np.nan, np.float32))
    shutil.copy(file.with_suffix(".csv"), tmp_path / "nan.csv")
    np.save(tmp_path / "narrow.npy", np.zeros((40, 3), np.float32))
    shutil.copy(file.with_suffix(".csv"), tmp_path / "narrow.csv")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 no")
    write_images(tmp_path / "other", ["new.png"])
    (tmp_path / "second").mkdir()
    write_encoder(tmp_path / "second" / "encoder.pt", {**SMALL, "size": 16})
    for source, images, name, message in [
        (run, tmp_path / "other", "features.parquet", "of other images"),
        (run, tmp_path / "other", "features.npy", "no features of 1 of 1 images, such as new.png"),
        (tmp_path / "second", photos, "features.parquet", "of another encoder"),
        (tmp_path / "second", photos, "features.npy", "has other features than this encoder gives some of the images"),
        (run, photos, "nan.npy", "NaN or infinite"),
        (run, photos, "narrow.npy", "16 dimensions"),
        (run, photos, "damaged.parquet", "damaged"),
        (run, photos, "missing.parquet", "must be a .parquet or .npy file"),
    ]:
        with pytest.raises(InputError, match=message):
            explore(source, f"images={images}", f"embeddings={tmp_path / name}")


def test_features_of_a_file_may_lack_unreadable_images(run: Path, photos: Path) -> None:
    file = run.parent / "features.npy"
    (photos / "cat" / "bad.png").write_bytes(b"no image")
    embed_cli.run([f"run={run}", f"images={photos}", f"out={file}", "device=cpu", "skip_unreadable=true"])
    assert len(explore(run, f"images={photos}", f"embeddings={file}")[1]["names"]) == 40
    write_images(photos, ["cat/new.png"])
    with pytest.raises(InputError, match="no features of 2 of 42 images"):
        explore(run, f"images={photos}", f"embeddings={file}")


def test_images_that_can_be_read_again_need_another_file(run: Path, photos: Path) -> None:
    """The file states its images by their sizes and times, which are the same after a short failure of a disk."""
    file, image = run.parent / "features.parquet", photos / "cat" / "again.png"
    write_images(photos, ["cat/again.png"])
    content, status = image.read_bytes(), image.stat()
    image.write_bytes(b"\0" * len(content))
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    embed_cli.run([f"run={run}", f"images={photos}", f"out={file}", "device=cpu", "skip_unreadable=true"])
    assert len(explore(run, f"images={photos}", f"embeddings={file}")[1]["names"]) == 40
    image.write_bytes(content)
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputError, match="no features of 1 of 41 images, such as cat/again.png; make it again"):
        explore(run, f"images={photos}", f"embeddings={file}")


def test_many_images_are_sampled_with_a_sentence(run: Path, photos: Path) -> None:
    _, data = explore(run, f"images={photos}", "limit=11")
    assert data["names"] == [sorted(NAMES)[row] for row in sample(40, 11)]
    assert column(data, "label") == [name.partition("/")[0] for name in data["names"]]
    assert "11 of 40 images are on this page, drawn at random" in (run.parent / "page.html").read_text()


def test_samples_are_ascending_and_repeat() -> None:
    rows = sample(100_000, 10_000)
    assert len(set(rows.tolist())) == 10_000
    assert (np.diff(rows) > 0).all()
    assert np.array_equal(rows, sample(100_000, 10_000))
    assert sample(5, 10).tolist() == [0, 1, 2, 3, 4]


def test_damaged_images_are_named_and_left_out(run: Path, photos: Path) -> None:
    (photos / "cat" / HOSTILE).write_bytes(b"no image")
    _, data = explore(run, f"images={photos}")
    assert len(data["names"]) == 40
    page = (run.parent / "page.html").read_text()
    assert "1 of 41 images cannot be read and are left out, such as cat/&lt;img" in page
    for name in NAMES:
        (photos / name).write_bytes(b"no image")
    (run.parent / "page.html").unlink()
    with pytest.raises(InputError, match="41 of 41 images cannot be read"):
        explore(run, f"images={photos}")
    assert not (run.parent / "page.html").exists()


def test_columns_of_a_manifest_color_the_images(run: Path, photos: Path) -> None:
    rows = [f"photos/{name},{'' if number % 2 else 'x'},site {number % 3}" for number, name in enumerate(NAMES)]
    lines = ["path,label,site", *rows]
    (photos.parent / "list.csv").write_text("\n".join(lines))
    _, data = explore(run, f"images={photos.parent / 'list.csv'}", "columns=site", "limit=9")
    expected = {f"photos/{name}": f"site {number % 3}" for number, name in enumerate(NAMES)}
    assert column(data, "site") == [expected[name] for name in data["names"]]
    assert set(column(data, "label")) == {"x", "(none)"}


def test_images_elsewhere_have_no_folder_of_this_machine(run: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "else", ["1.png", "2.png"])
    (tmp_path / "lists").mkdir()
    rows = "".join(f"{tmp_path}/else/{number}.png,{number}\n" for number in (1, 2))
    (tmp_path / "lists" / "list.csv").write_text(f"path,site\n{rows}{tmp_path}/else/3.png,3\n")
    (tmp_path / "else" / "3.png").write_bytes(b"no image")
    _, data = explore(run, f"images={tmp_path / 'lists' / 'list.csv'}", "columns=site")
    assert data["names"] == ["1.png", "2.png"]
    assert without_folders(["/a/b/p/1.png", "c.png", "/a/q/p"]) == ["b/p/1.png", "c.png", "q/p"]
    assert str(tmp_path) not in (tmp_path / "page.html").read_text()


def test_bands_of_many_channels_are_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_encoder(tmp_path / "run" / "encoder.pt", {**SMALL, "channels": 3})
    write_images(tmp_path / "photos", ["1.png"])
    for bands, note in ((["bands=2"], "channel 2 of 3, as"), ([], "all channels, as")):
        explore(tmp_path / "run", f"images={tmp_path / 'photos'}", *bands)
        assert note in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("names", [["1.png"], ["1.png", "2.png"]])
def test_one_or_two_equal_images_have_a_page(run: Path, tmp_path: Path, names: list[str]) -> None:
    write_images(tmp_path / "photos", names)
    for name in names:
        Image.new("RGB", (8, 8), "red").save(tmp_path / "photos" / name)
    _, data = explore(run, f"images={tmp_path / 'photos'}", "projection=tsne")
    assert data["groups"] == ([] if len(names) == 1 else [[0, 1]])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["images=nowhere"], "nowhere"),
        (["images=PHOTOS/empty"], "holds no image"),
        (["images=PHOTOS", "projection=pcaa"], "projection=pcaa does not exist; did you mean pca"),
        (["images=PHOTOS", "clusters=0"], "clusters=0 must be a whole number from 1 to 200, or auto"),
        (["images=PHOTOS", "clusters=41"], "clusters=41 but there are 40 images"),
        (["images=PHOTOS", "threshold=1.5"], "threshold=1.5 must be a number from 0 to 1"),
        (["images=PHOTOS", "limit=60000"], "limit=60000 must be a whole number from 1 to 50,000"),
        (["images=PHOTOS", "bands=1,2,9"], "bands=1,2,9 must be one or three channels from 1 to 3"),
        (["images=PHOTOS", "columns=site"], "site"),
        (["images=PHOTOS", "backend=tf"], "backend=tf does not exist; choose one of torch, onnx"),
        (["images=PHOTOS", "encoder=x.pt"], "give either run=DIR, the folder of a finished run, or encoder=FILE"),
        (["images="], "images= has no value; write images=... or leave it out"),
        (["images=PHOTOS", "colour=label"], "colour=label has no effect on fedssl-explore"),
        (["images=PHOTOS", "out=page.txt"], "out=page.txt does not end in .html, .htm"),
        (["images=PHOTOS", "out=none/page.html"], "create none first"),
        (["embeddings=x.parquet"], "embeddings= needs the images; add images=PATH"),
        (["dataset.label=null"], "dataset.label=null has no effect on the images of the run's clients"),
        (["images=PHOTOS", "dataset.channels=4"], "dataset.channels has no effect here"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(run: Path, photos: Path, overrides: list[str], message: str) -> None:
    (photos / "empty").mkdir()
    before = sorted(run.parent.rglob("*"))
    with pytest.raises(InputError, match=message):
        explore(run, *(override.replace("PHOTOS", str(photos)) for override in overrides))
    assert sorted(run.parent.rglob("*")) == before


def test_names_of_a_runs_images_have_no_path(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", NAMES)
    path = str(tmp_path / "photos")
    data = read("train", channels=3, size=16, limit=None, path=path)
    assert data is not None
    images = RunImages("photos", data, np.arange(40), np.arange(40) % 3 - 1, tmp_path / "photos")
    names = [f"{kind}/{number}.png" for kind in ("cat", "dog") for number in range(20)]
    rows = np.array([0, 5, 31])
    assert set(images.names(rows)) <= set(names)
    assert replace(images, root=None).names(rows) == [Path(name).name for name in images.names(rows)]
    label, client = images.columns(rows, [])
    assert [label.values[code] for code in label.codes] == [name.partition("/")[0] for name in images.names(rows)]
    assert [client.values[code] for code in client.codes] == ["(none)", "client 1", "client 0"]
    (block,) = images.blocks(40)
    np.testing.assert_array_equal(block.images[rows], images.decode(rows, size=16))
    sampled = images.sampled(4)
    assert sampled.names(np.arange(4)) == images.names(sample(40, 4))
    assert sampled.columns(np.arange(4), [])[1].codes.tolist() == images.columns(sample(40, 4), [])[1].codes.tolist()


@pytest.mark.heavy
def test_a_run_shows_the_images_of_its_clients(tmp_path: Path) -> None:
    command = "from fedssl.command_line import fedssl; fedssl()"
    settings = ["rounds=1", "local_epochs=1", "num_clients=3", "dataset.limit=60", "evaluate_every=0"]
    settings += ["encoder.width=4", "threads=1", "collapse_images=0", "measure_resources=false"]
    arguments = [sys.executable, "-c", command, *settings, "final_evaluation=knn", f"output_dir={tmp_path / 'run'}"]
    subprocess.run(arguments, check=True, cwd=tmp_path)
    _, data = explore(tmp_path / "run")
    assert len(data["names"]) == 60
    assert {"label", "client"} <= {each["title"] for each in data["columns"]}
    header, *lines = (line.split(",") for line in (tmp_path / "run" / "partition.csv").read_text().splitlines())
    pairs = list(zip(column(data, "client"), column(data, "label"), strict=True))
    for client, _, *counts in lines:
        assert [pairs.count((f"client {client}", label)) for label in header[2:]] == list(map(int, counts))


def test_images_of_a_run_may_move_but_not_change(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", NAMES)
    settings = ["dataset=folder", f"dataset.path={tmp_path / 'photos'}", "dataset.size=16", "encoder.width=4"]
    few = ["rounds=1", "local_epochs=1", "num_clients=2", "threads=1", "final_evaluation=none", "partition=iid"]
    folder = tmp_path / "run"
    simulate([*settings, *few, f"output_dir={folder}"])
    _, before = explore(folder)
    (tmp_path / "photos").rename(tmp_path / "moved")
    find_changes()  # as in another process
    with pytest.raises(InputError, match="dataset.path: .*photos is not a folder"):
        explore(folder)
    _, after = explore(folder, f"dataset.path={tmp_path / 'moved'}")
    assert column(after, "client") == column(before, "client")
    (tmp_path / "moved" / NAMES[0]).unlink()
    find_changes()
    with pytest.raises(InputError, match="images are in 31 files, .* and were in 32 files, .*[0-9a-f] when the run"):
        explore(folder, f"dataset.path={tmp_path / 'moved'}")
