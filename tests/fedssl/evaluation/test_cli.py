"""The command `fedssl-evaluate`."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from fedssl.config.load import compose
from fedssl.encoders import conv_small
from fedssl.evaluation import cli
from fedssl.export import save_encoder

TWICE = [f"+evaluation@evaluation.protocols.{name}=knn" for name in ("a", "b")]


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """The files of a run folder that the command needs: settings and encoder of a run on the digits."""
    settings = compose(["seed=7", "dataset=digits", "dataset.limit=300", "encoder=conv_small", "encoder.width=4"])
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(settings.recording.config))
    write_encoder(tmp_path / "encoder.pt")
    return tmp_path


def write_encoder(file: Path, *, channels: int = 1, size: int = 8, **metadata: object) -> None:
    torch.manual_seed(0)
    settings = {"_target_": "fedssl.encoders.conv_small", "channels": channels, "size": size, "width": 4}
    encoder = conv_small(channels=channels, size=size, width=4)
    save_encoder(file, encoder, settings=settings, mean=[0.3] * channels, std=[0.4] * channels, metadata=metadata)


def write_images(folder: Path) -> None:
    for number in range(20):
        (inner := folder / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 200 * number, np.uint16)).save(inner / f"{number}.png")


def command(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    monkeypatch.setattr("sys.argv", ["fedssl-evaluate", *overrides])
    monkeypatch.setattr(cli.torch, "set_num_threads", lambda threads: None)
    return cli.main()


def test_command_evaluates_a_run_on_its_own_data(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert command(monkeypatch, f"run={finished_run}", "evaluation.k=20") == 0
    report = json.loads((finished_run / "evaluation" / "knn-digits.json").read_text())
    assert report["images"]["train"] == 300
    assert report["seed"] == 7
    assert report["evaluation"]["k"] == 20
    assert report["units"] == {"knn": "accuracy"}
    assert report["test_images"] == {"knn": report["images"]["test"]}
    assert 0.3 < report["results"]["knn"] < 1  # an untrained encoder is far from chance
    output = capsys.readouterr().out
    accuracy = f"{100 * report['results']['knn']:.1f}"
    assert re.search(rf"knn +{accuracy} +{report['images']['test']}\n", output)
    assert str(finished_run / "evaluation" / "knn-digits.json") in output


def test_another_evaluation_keeps_the_file_of_the_former(finished_run: Path, monkeypatch: pytest.MonkeyPatch):
    folder = finished_run / "evaluation"
    for overrides in ([], ["evaluation.k=20"], ["++dataset.limit=200", "++seed=5"], ["evaluation.k=20"]):
        assert command(monkeypatch, f"run={finished_run}", *overrides) == 0
        (folder / "knn-digits-3.json").touch()  # of somebody else, and no report
    digits = [json.loads((folder / f"knn-digits{end}.json").read_text()) for end in ("", "-2", "-4")]
    assert [each["evaluation"]["k"] for each in digits] == [200, 20, 200]
    assert [each["dataset"]["limit"] for each in digits] == [300, 300, 200]
    assert [each["seed"] for each in digits] == [7, 7, 5]
    for name in ("one", "two", "one"):
        write_images(finished_run / name / "images")
        monkeypatch.chdir(finished_run / name)
        images = ["dataset=folder", "dataset.path=images", "dataset.channels=1", "dataset.cache=null"]
        assert command(monkeypatch, f"run={finished_run}", *images) == 0
    images = [json.loads((folder / f"knn-folder{end}.json").read_text())["dataset"] for end in ("", "-2")]
    paths = [each["reader"]["values"]["path"] for each in images]
    assert paths == [str(finished_run / name / "images") for name in ("one", "two")]
    assert len([*folder.iterdir()]) == 6


def test_command_standardizes_and_resizes_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_encoder(tmp_path / "encoder.pt", channels=3, size=16)
    overrides = [f"encoder={tmp_path / 'encoder.pt'}", "dataset=digits", "dataset.limit=100"]
    assert command(monkeypatch, *overrides, "dataset.channels=3") == 0
    report = json.loads((tmp_path / "evaluation" / "knn-digits.json").read_text())
    assert report["dataset"]["size"] == 16
    assert report["dataset"]["mean"] == [0.3] * 3
    assert report["dataset"]["std"] == [0.4] * 3


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"window": [0, 4095], "percentiles": None, "background": 0}),
        (["++dataset.window=null"], {"window": None, "percentiles": None, "background": 0}),
        (["dataset.percentiles=[1,99]"], {"window": None, "percentiles": [1, 99], "background": 0}),
        (["dataset.window=[0,1023]", "dataset.background=7"], {"window": [0, 1023], "background": 7}),
    ],
)
def test_command_scales_pixels_as_in_training_unless_told_otherwise(
    overrides, expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_encoder(tmp_path / "encoder.pt", **{"dataset.window": [0, 4095], "dataset.background": 0})
    write_images(tmp_path / "images")
    source = [f"encoder={tmp_path / 'encoder.pt'}", "dataset=folder", f"dataset.path={tmp_path / 'images'}"]
    assert command(monkeypatch, *source, "dataset.channels=1", "dataset.cache=null", *overrides) == 0
    reader = json.loads((tmp_path / "evaluation" / "knn-folder.json").read_text())["dataset"]["reader"]["values"]
    assert {key: reader[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "give either run=DIR"),
        (["run={run}", "encoder={run}/encoder.pt"], "give either run=DIR"),
        (["run={run}/nowhere"], "nowhere does not exist; give the folder"),
        (["encoder={run}/encoder.pt"], "add dataset=NAME"),
        (["run={run}", "dataset.pth=x"], "dataset.pth=x does not fit the data set"),
        (["run={run}", "evaluation=kn"], "did you mean knn"),
        (["run={run}", "evaluation.k=0"], "k=0"),
        (["run={run}", "dataset.std=[0.1]"], "dataset.std=.0.1. has no effect .* standardizes images .*; remove it$"),
        (["run={run}", "final_evaluation=linear"], "has no effect on fedssl-evaluate; write evaluation=linear"),
        (["run={run}", "final_evaluation.protocols.knn.k=9"], "protocols.knn.k=9 has no effect .*; remove it"),
        (["run={run}", "rounds=5"], "rounds=5 has no effect .*; remove it .allowed are settings of dataset, "),
        (["run={run}", "evaluation=none", *TWICE], "protocols.b both have the results knn, .*run=DIR evaluation=knn"),
        (
            ["run={run}", "dataset=digits", "dataset.channels=3"],
            r"1 channel\(s\) but dataset.channels=3; add .*gray and RGB",
        ),
        (["run={run}", "dataset.splits={{federated: train, train: train, test: null}}"], "no labeled test images"),
        (
            ["run={run}", "evaluation=few_labels", "dataset.limit=12"],
            "linear_2_per_class is left out: class .* has 1 labeled training image; linear_5.*choose evaluation=knn",
        ),
    ],
)
def test_command_answers_bad_input_with_one_sentence(overrides, message, finished_run: Path, monkeypatch, capsys):
    status = command(monkeypatch, *(word.format(run=finished_run) for word in overrides or ["evaluation=knn"]))
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err)


def test_images_without_a_class_are_evaluated_beside_labeled_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Leave out the class of the test images 0, 3, 6 and 9 of 12, and the age of 0, 4 and 8."""
    write_encoder(tmp_path / "encoder.pt")
    lines = ["image,label,split,age"]
    for split in ("train", "test"):
        for number in range(12):
            Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(tmp_path / f"{split}{number}.png")
            label, age = "ab"[number % 2] if number % 3 else "", number if number % 4 else ""
            lines.append(f"{split}{number}.png,{label},{split},{age}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    source = [f"encoder={tmp_path / 'encoder.pt'}", "dataset=folder", f"dataset.path={tmp_path / 'list.csv'}"]
    source += ["dataset.channels=1", "dataset.cache=null", "evaluation=none"]
    protocols = [f"+evaluation@evaluation.protocols.{name}={name}" for name in ("knn", "regression")]
    assert command(monkeypatch, *source, *protocols, "evaluation.protocols.regression.columns=[age]") == 0
    report = json.loads((tmp_path / "evaluation" / "none-folder.json").read_text())
    assert report["images"] == {"train": 12, "test": 12}
    assert report["test_images"] == {"knn": 8} | {f"regression_{name}": 9 for name in ("r2", "mae", "spearman")}


def test_a_folder_that_cannot_be_written_is_refused_before(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (finished_run / "evaluation").touch()
    monkeypatch.setattr(cli, "evaluate_domains", None)
    assert command(monkeypatch, f"run={finished_run}") == 2
    assert re.search("evaluation cannot be written .*File exists.*encoder=COPY", capsys.readouterr().err)


def test_command_distinguishes_an_unfinished_run_from_a_wrong_folder(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (finished_run / "encoder.pt").unlink()
    assert command(monkeypatch, f"run={finished_run}") == 2
    assert f"fedssl resume={finished_run}" in capsys.readouterr().err
