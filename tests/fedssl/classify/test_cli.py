"""The command ``fedssl-classify``: its files, what it refuses, and what it leaves out."""

import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from fedssl.classify import onnx_file
from fedssl.classify.classifier import Classifier
from fedssl.classify.cli import run as classify
from fedssl.command_line import run_command
from fedssl.embedding import load_embedder
from fedssl.errors import RunError
from tests.fedssl.classify.conftest import COLORS, table, write
from tests.fedssl.embedding.test_cli import WITHOUT_TORCH


def test_unlabeled_images_get_their_class_and_probabilities(run: Path, photos: Path) -> None:
    text = classify([f"run={run}", "labeled=photos/labeled", "images=photos", "report=r.json"])
    assert "18 labeled images of 3 classes" in text
    assert "predictions of 18 of 38 images: predictions.csv" in text
    lines = table("predictions.csv")
    copies = {"copy-0.png", "copy-1.png"}
    assert {line["path"] for line in lines} == {path.name for path in photos.glob("*.png")} - copies
    for line in lines:
        assert line["prediction"] == line["path"].rpartition("-")[0]
        probabilities = [float(line[f"p({name})"]) for name in COLORS]
        assert sum(probabilities) == pytest.approx(1, abs=1e-3)
        assert max(probabilities) == pytest.approx(float(line["probability"]), abs=1e-3)
    report = json.loads(Path("r.json").read_text())
    assert report["accuracy"] == 1
    assert report["interval"][0] == pytest.approx(18 / (18 + 1.959964**2))  # Wilson's for 18 of 18
    assert report["classes"]["rød, 1"] == {"images": 6, "recall": 1}
    assert report["confusion"] == [[6, 0, 0], [0, 6, 0], [0, 0, 6]]


def test_labeled_images_are_predicted_if_asked(run: Path, photos: Path) -> None:
    text = classify([f"run={run}", "labeled=photos/labeled", "images=photos/labeled", "out=none.csv"])
    assert "predictions of 0 of 18 images (all of them are labeled; include_labeled=true" in text
    classify([f"run={run}", "labeled=photos/labeled", "images=photos", "include_labeled=true"])
    assert len(table("predictions.csv")) == 38


def test_a_terminal_shows_the_progress(
    run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    classify([f"run={run}", "labeled=photos/labeled"])
    assert "18/18" in capsys.readouterr().err


def test_a_class_with_one_image_is_named(run: Path, photos: Path) -> None:
    for file in sorted(Path("photos/labeled/blue").iterdir())[1:]:
        file.unlink()
    text = classify([f"run={run}", "labeled=photos/labeled", "images=photos"])
    assert "1 image is not in the accuracy: no other image, or none of another group" in text
    assert "has the same class (such as blue)" in text
    assert re.search(r"^blue +0 +-$", text, re.MULTILINE)


def test_an_image_of_something_else_is_unusual(run: Path, photos: Path) -> None:
    stripes = np.zeros((11, 9, 3), np.uint8)
    stripes[::2] = 255
    Image.fromarray(stripes).save("photos/zebra.png")
    classify([f"run={run}", "labeled=photos/labeled", "images=photos"])
    unusual = [line["path"] for line in table("predictions.csv") if line["unusual"] == "yes"]
    assert "zebra.png" in unusual
    assert len(unusual) < 6


@pytest.mark.parametrize("space", ["\u202f", "\u3000", "\u200c", "\u200d", "\xa0", "\u200e", "\ufeff"])
def test_names_with_spaces_of_any_script_can_be_labeled(run: Path, photos: Path, space: str) -> None:
    for number, name in enumerate(list(COLORS) * 4):
        write(photos / "new" / f"{space}{name}{space}{number}{space}.png", name, seed=20 + number)
    rename = photos / "labeled" / f"blue{space}one"
    (photos / "labeled" / "blue").rename(rename)
    classify([f"run={run}", "labeled=photos/labeled", "images=photos/new", "label_next=6", "next=photos/next.csv"])
    lines = table("predictions.csv")
    assert len(lines) == 12
    assert all((photos / "new" / line["path"]).is_file() for line in lines)
    assert rename.name in {line["prediction"] for line in lines}
    lines = table("photos/next.csv")
    with Path("photos/next.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label"), *((line["path"], line["path"][7:10]) for line in lines)])
    assert "6 labeled images of 2 classes" in classify([f"run={run}", "labeled=photos/next.csv"])


@pytest.mark.parametrize("classes", [("+", "-"), ("@", "++")])
def test_signs_are_classes_and_begin_names(run: Path, photos: Path, classes: tuple[str, str]) -> None:
    for number in range(12):
        write(photos / "pm" / classes[number % 2] / f"-{number}.png", ("green", "blue")[number % 2], seed=number)
        write(photos / "new" / f"{'=+-@'[number % 4]}{number}.png", "blue", seed=30 + number)
    classify([f"run={run}", "labeled=photos/pm", "images=photos/new", "label_next=3"])
    lines = table("predictions.csv")
    assert [line["prediction"] for line in lines] == [classes[1]] * 12
    assert {f"p({name})" for name in classes} < lines[0].keys()
    assert all((photos / "new" / line["path"]).is_file() for line in lines)
    assert {line["path"][:2] for line in lines} == {"./"}
    assert {line["prediction"] for line in table("label_next.csv")} == {classes[1]}


@pytest.mark.parametrize("backend", ["onnx", pytest.param("torch", marks=pytest.mark.heavy)])
def test_graph_of_encoder_and_classifier_gives_the_predictions(run: Path, photos: Path, backend: str) -> None:
    words = [f"run={run}", "labeled=photos/labeled", "images=photos", "onnx=all.onnx", "device=cpu"]
    classify([*words, f"backend={backend}"])
    session = onnxruntime.InferenceSession("all.onnx")
    classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
    assert classes == sorted(COLORS)
    assert [output.name for output in session.get_outputs()] == ["representations", "probabilities"]
    images = np.stack([np.array(Image.open(f"photos/blue-{number}.png").resize((8, 8))) for number in (6, 7, 8)])
    (probabilities,) = session.run(["probabilities"], {"images": images.transpose(0, 3, 1, 2)})
    assert [classes[best] for best in probabilities.argmax(axis=1)] == ["blue"] * 3
    assert load_embedder("all.onnx", backend="onnx").dimension == 16  # still an encoder


def test_a_wrong_graph_is_not_written(run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = onnx_file._append

    def wrong(encoder: Path, model: Classifier, file: Path) -> None:
        append(encoder, replace(model, bias=model.bias + np.arange(3)), file)

    monkeypatch.setattr(onnx_file, "_append", wrong)
    with pytest.raises(RunError, match="nothing was written"):
        classify([f"run={run}", "labeled=photos/labeled", "images=photos", "onnx=all.onnx", "backend=onnx"])
    assert {path.name for path in photos.parent.iterdir()} == {"photos"}


def test_onnx_runtime_alone_needs_no_torch_and_500_megabytes(run: Path, photos: Path) -> None:
    words = [f"run={run}", "labeled=photos/labeled", "images=photos", "label_next=3", "onnx=a.onnx", "backend=onnx"]
    code = WITHOUT_TORCH.replace("fedssl_embed", "fedssl_classify")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *text, megabytes = done.stdout.splitlines()
    assert "predictions of 18 of 38 images: predictions.csv" in text
    assert int(megabytes) < 500


def test_titles_of_a_spreadsheet_are_those_of_columns(run: Path, photos: Path) -> None:
    rows = [(path, path.parent.name == "blue", path.stem[-1]) for path in sorted(photos.glob("labeled/*/*.png"))]
    found = {}
    for header in ("path,label,group", "Path,Label,Group", "path,label,other"):
        lines = (f'"{path}",{str(is_blue).upper()},{group}\n' for path, is_blue, group in rows)
        Path("labels.csv").write_text(f"{header}\n{''.join(lines)}")
        found[header] = classify([f"run={run}", "labeled=labels.csv"])
        assert json_of(run, f"{header}.json").keys() == {"False", "True"}
    assert found["Path,Label,Group"] == found["path,label,group"] != found["path,label,other"]


def json_of(run: Path, file: str) -> dict[str, dict[str, float]]:
    classify([f"run={run}", "labeled=labels.csv", f"report={file}"])
    classes: dict[str, dict[str, float]] = json.loads(Path(file).read_text())["classes"]
    return classes


def test_joined_labels_are_one_class_with_a_warning(run: Path, photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared("lists")
    assert "6 labeled images of 2 classes" in classify([f"run={run}", "labeled=labels.csv"])
    assert "each of a|b counts as one class; fedssl-evaluate predicts numbers with" in caplog.text


def prepared(case: str) -> None:
    """Change the labeled images of a case."""
    labeled = Path("photos/labeled")
    if case == "one class":
        shutil.rmtree(labeled / "green")
        shutil.rmtree(labeled / "rød, 1")
    if case == "two labels":
        shutil.copy(labeled / "green/green-0.png", labeled / "blue/again.png")
    if case == "csv":
        Path("labels.csv").write_text("path,label\nphotos/blue-6.png,blue\nphotos/missing.png,green\n")
    if case == "empty":
        Path("labels.csv").write_text("path,label\nphotos/blue-6.png,\nphotos/blue-7.png,\n")
    if case in ("numbers", "lists"):
        labels = {"numbers": ("0.5", "1.25"), "lists": ("a|b", "c")}[case]
        names = ("blue-6", "blue-7", "blue-8", "green-6", "green-7", "green-8")
        rows = (f"photos/{name}.png,{labels[number % 2]}\n" for number, name in enumerate(names))
        Path("labels.csv").write_text("path,label\n" + "".join(rows))
    if case == "column":
        Path("labels.csv").write_text("path,kind\nphotos/blue-6.png,blue\nphotos/green-7.png,green\n")
    if case == "exists":
        Path("predictions.csv").touch()
    if case == "damaged":
        (labeled / "green/green-0.png").write_bytes(b"no image")


@pytest.mark.parametrize(
    ("case", "words", "message"),
    [
        ("", ["labeled=nowhere"], "labeled: nowhere is not a folder"),
        ("", ["labeled=photos/labeled", "images=nowhere"], "images: nowhere is not a folder"),
        ("", ["images=photos"], "labeled is missing; add labeled=PATH, or choose first images to label"),
        ("", ["labeled=photos/labeled", "out=p.csv"], "out=p.csv needs images"),
        ("", ["images=photos", "label_next=2", "report=r.json"], "report=r.json needs labeled"),
        ("", ["labeled=photos/labeled", "next=n.csv"], "next=n.csv needs label_next"),
        ("", ["labeled=photos/labeled", "label_next=-3"], "label_next=-3 must be a whole number from 0"),
        ("", ["labeled=photos/labeled", "images=photos", "out=p.xlsx"], "out=p.xlsx does not end in .csv"),
        ("", ["labeled=photos/labeled", "images=photos", "out=no/p.csv"], "folder that does not exist"),
        ("", ["labeled=photos/labeled", "images=photos", "out=a.csv", "next=a.csv", "label_next=3"], "the same file"),
        (
            "",
            ["labeled=photos/labeled", "images=photos", "out=a.csv", "next=photos/../a.csv", "label_next=3"],
            "same file",
        ),
        ("", ["label=photos/labeled"], "did you mean labeled"),
        ("", ["labeled=photos/labeled", "include_labeled=yes", "images=photos"], "include_labeled=true or"),
        ("", ["labeled=photos/labeled", "label_next=2"], "no image without a label; give others with images=PATH"),
        ("", ["labeled=photos/labeled", "backend=tf"], "backend=tf"),
        ("exists", ["labeled=photos/labeled", "images=photos"], "predictions.csv exists already; choose another file"),
        ("exists", ["labeled=nowhere", "images=photos"], "labeled: nowhere is not a folder"),
        ("one class", ["labeled=photos/labeled"], "one class only, but a classifier needs two"),
        ("two labels", ["labeled=photos/labeled"], "blue/again.png and .* the same image, but labeled 'blue' and 'gr"),
        ("csv", ["labeled=labels.csv"], "1 of the 2 image files .* do not exist, .*dataset.skip_missing=true"),
        ("empty", ["labeled=labels.csv"], "labels.csv has a column label without a value; write the classes"),
        ("column", ["labeled=labels.csv"], "another name: dataset.label=NAME"),
        ("column", ["labeled=labels.csv", "dataset.label=null"], "remove it, or name the column of the classes with"),
        ("numbers", ["labeled=labels.csv"], "0.5.*; fedssl-evaluate predicts numbers with evaluation=regression, and"),
        ("damaged", ["labeled=photos/labeled"], "1 of 18 images cannot be read: .*skip_unreadable=true"),
    ],
)
def test_bad_input_is_one_sentence_before_a_file_is_written(
    case: str, words: list[str], message: str, run: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(case)
    before = {path.name for path in photos.parent.iterdir()}

    def command() -> None:
        classify([f"run={run}", *words])

    assert run_command("fedssl-classify", command) == 2
    assert {path.name for path in photos.parent.iterdir()} == before
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
