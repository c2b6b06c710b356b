"""Exports: the readers of other programs give our representations from the exported files alone."""

import dataclasses
import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import timm
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor

from fedssl.config.load import compose
from fedssl.datasets.raster import pixel_metadata
from fedssl.embedding import onnx_backend
from fedssl.errors import InputError, RunError
from fedssl.export import cli, formats, load_encoder, weights
from fedssl.export.formats import FORMATS, export
from fedssl.export.onnx import compare, quantize, run_onnx
from fedssl.export.source import ExportSource
from fedssl.export.timm_weights import timm_model
from fedssl.runs.run import read_run
from tests.cases import some
from tests.fedssl.export.made import METADATA, RESNET, SMALL, VIT, images_like, ours, source_of, theirs, write_encoder
from tests.fedssl.export.test_encoder_file import save


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run folder that the command needs."""
    folder = tmp_path_factory.mktemp("run")
    write_encoder(folder / "encoder.pt", SMALL)
    overrides = ["seed=7", "dataset=digits", "dataset.channels=3", "encoder=conv_small", "strategy=eua", "rounds=7"]
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(compose(overrides).recording.config))
    (folder / "choices.yaml").write_text("dataset: digits\nstrategy: eua\nmethod: simclr\n")
    results = {"untrained": {"knn": 0.5}, "federated": {"knn": 0.625}, "pixels": {"knn": 0.25}}
    summary = {"status": "finished", "reason": None, "overrides": overrides, "final": results}
    summary["units"] = {"knn": "accuracy"}
    summary |= {"versions": {"torch": "9.8.7"}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def command(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    monkeypatch.setattr("sys.argv", ["fedssl-export", *overrides])
    return cli.main()


def test_torch_runs_the_program_on_uint8_images(run: Path, monkeypatch, capsys):
    assert command(monkeypatch, f"run={run}", "format=torch_export") == 0
    file = run / "encoder.pt2"
    told = re.search(r"largest difference of representations: (\S+) ", capsys.readouterr().out)
    assert float(told[1]) <= 1e-5
    encoder = load_encoder(run / "encoder.pt")
    for count in (1, 3):
        images = images_like(encoder, count)
        torch.testing.assert_close(theirs("torch_export", file, images), ours(encoder, images), rtol=0, atol=1e-5)


def test_safetensors_has_weights_by_name_and_metadata_as_json(run: Path, tmp_path: Path, monkeypatch):
    file = tmp_path / "mine.safetensors"
    assert command(monkeypatch, f"run={run}", "format=safetensors", f"output={file}") == 0
    encoder, again = load_encoder(run / "encoder.pt"), load_encoder(file)
    weights = safetensors.torch.load_file(file)
    assert weights.keys() == encoder.state_dict().keys()
    assert all(torch.equal(value, encoder.state_dict()[name]) for name, value in weights.items())
    with safetensors.safe_open(file, "pt") as stored:
        described = json.loads(stored.metadata()["fedssl"])
    assert (described["encoder"], described["metadata"]) == (SMALL, METADATA)
    assert (described["mean"], described["std"]) == ([0.25, 0.5, 0.75], [0.5, 0.25, 0.125])
    images = images_like(encoder)
    assert torch.equal(again(again.preprocess(images)), ours(encoder, images))


@pytest.fixture(scope="module")
def graph(run: Path) -> Path:
    """The encoder of the run as an ONNX file."""
    cli.run([f"run={run}", "format=onnx"])
    return run / "encoder.onnx"


def test_onnx_maps_uint8_images_in_any_number(graph: Path):
    encoder, session = load_encoder(graph.with_name("encoder.pt")), onnxruntime.InferenceSession(graph)
    (taken,), (given,) = session.get_inputs(), session.get_outputs()
    assert (taken.name, taken.type, taken.shape[1:]) == ("images", "tensor(uint8)", [3, 8, 8])
    assert (given.name, given.shape[1:]) == ("representations", [16])
    for count in (1, 3):
        images = images_like(encoder, count)
        torch.testing.assert_close(theirs("onnx", graph, images), ours(encoder, images), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "sincos"},
        {"pool": "mean", "channels": 1},
        {"_target_": "fedssl.encoders.vit_small", "registers": 2},
        {"_target_": "fedssl.encoders.vit_base", "registers": 3, "pool": "mean", "positions": "sincos"},
    ],
    ids=["token", "mean", "registers", "registers-mean"],
)
def test_timm_makes_our_transformer(changes: dict[str, Any], tmp_path: Path):
    source = source_of(tmp_path, {**VIT, **changes})
    file = tmp_path / "encoder.timm.safetensors"
    assert export(source, "timm", file) <= 1e-5
    assert_code_loads(source, file)


def assert_code_loads(source: ExportSource, file: Path) -> None:
    """Assert that the code creates a model of timm with our representations."""
    names: dict[str, Any] = {}
    exec(timm_model(source).code(file), names)
    images = images_like(source.encoder)
    with torch.no_grad():
        found = names["encoder"](source.encoder.preprocess(images))
    torch.testing.assert_close(found, ours(source.encoder, images), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [VIT, pytest.param({**RESNET, "size": 32, "stem": "imagenet"}, marks=pytest.mark.heavy)]
)
def test_hub_folder_is_timms_if_timm_has_the_architecture(settings: dict[str, Any], tmp_path: Path):
    source, folder = source_of(tmp_path, settings), tmp_path / "folder"
    assert export(source, "huggingface", folder) <= 1e-5
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = json.loads((folder / "config.json").read_text())
    assert config["num_features"] == model.num_features
    assert model.get_submodule(config["pretrained_cfg"]["first_conv"]).in_channels == 3
    form = timm.data.resolve_model_data_config(model)
    size = settings["size"]
    assert (form["input_size"], form["interpolation"], form["crop_pct"]) == ((3, size, size), "bilinear", 1.0)
    images = images_like(source.encoder)
    mean, std = (torch.tensor(form[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        found = model((images / 255 - mean) / std)
    torch.testing.assert_close(found, ours(source.encoder, images), rtol=0, atol=1e-5)
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert 'create_model("hf-hub:USER/NAME", pretrained=True)' in code
    rotated = Image.new("CMYK", (2 * size, size))
    rotated.paste((0, 200, 100, 0), (0, 0, size, size))
    exif = rotated.getexif()
    exif[0x0112] = 6  # its orientation
    rotated.save(tmp_path / "rotated.jpg", exif=exif)
    names: dict[str, Any] = {}
    exec(code.replace("hf-hub:USER/NAME", f"local-dir:{folder}").replace("FILE", str(tmp_path / "rotated.jpg")), names)
    found = names["features"].numpy()
    expected = source.encoder(source.encoder.preprocess(tmp_path / "rotated.jpg")).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_other_hub_folders_are_loaded_by_fedssl_and_have_cards(run: Path, monkeypatch):
    assert command(monkeypatch, f"run={run}", "format=huggingface") == 0
    folder = run / "encoder-huggingface"
    files = {file.name for file in folder.iterdir()}
    assert files == {"config.json", "model.safetensors", "preprocessor_config.json", "README.md"}
    encoder, again = load_encoder(run / "encoder.pt"), load_encoder(folder / "model.safetensors")
    images = images_like(encoder)
    assert torch.equal(again(again.preprocess(images)), ours(encoder, images))
    assert json.loads((folder / "config.json").read_text())["fedssl"]["encoder"] == SMALL
    form = json.loads((folder / "preprocessor_config.json").read_text())
    assert (form["size"], form["image_mean"]) == ({"shortest_edge": 8}, [0.25, 0.5, 0.75])
    assert (form["do_rescale"], form["rescale_factor"]) == (True, 1 / 255)
    card = (folder / "README.md").read_text()
    assert "library_name: fedssl\n" in card
    for line in ("| strategy | eua |", "| data set | digits |", "| rounds | 7 |", "| seed | 7 |"):
        assert line in card
    assert re.search(r"^knn +50\.0 +62\.5 +25\.0$", card, flags=re.M)
    assert "torch 9.8.7" in card
    assert "fedssl seed=7 dataset=digits" in card
    assert "license: unknown" in card


@pytest.mark.heavy
@pytest.mark.parametrize("form", ["onnx", "torch_export", "safetensors"])
@pytest.mark.parametrize(
    "settings", [VIT, {**VIT, "pool": "mean", "registers": 2}, RESNET], ids=["token", "mean", "resnet18"]
)
def test_every_format_has_every_architecture(form: str, settings: dict[str, Any], tmp_path: Path):
    source, target = source_of(tmp_path, settings), tmp_path / f"exported{FORMATS[form].ending}"
    assert export(source, form, target) <= 1e-5
    encoder = load_encoder(source.file)
    images = images_like(encoder)
    torch.testing.assert_close(theirs(form, target, images), ours(encoder, images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["onnx", "torch_export", "safetensors"])
def test_a_folder_whose_name_is_not_utf_8(form: str, tmp_path: Path):
    folder = tmp_path / os.fsdecode(b"\xe9")
    folder.mkdir()
    file = folder / f"exported{FORMATS[form].ending}"
    source = source_of(folder, SMALL)
    assert export(source, form, file) <= 1e-5
    if form == "onnx":
        images = images_like(source.encoder, 8)
        quantize(file, folder / "int8.onnx", images, dynamic=False)
        compared = compare(file, folder / "int8.onnx", images, difference=0.0)
        assert 0.9 < compared.min_cosine < 1
        embedder = onnx_backend.load(file, device="cpu", folders=())
        torch.testing.assert_close(embedder.outputs(images.numpy())[0], run_onnx(file, images).numpy())


# tests/fedssl/embedding/test_embeddings.py compares ONNX with torch by default.
@pytest.mark.parametrize("form", some(("onnx", "torch_export", "huggingface"), default=("torch_export", "huggingface")))
def test_an_encoder_with_a_window_takes_the_values_of_files(form: str, tmp_path: Path):
    file = save(tmp_path / "encoder.pt", metadata=pixel_metadata({"window": [-1000, 3000]}))
    source = ExportSource.read(file)
    target = tmp_path / f"exported{FORMATS[form].ending}"
    assert export(source, form, target) <= formats.TOLERANCE
    values = torch.randint(-1000, 3001, (3, 3, 16, 16), generator=torch.Generator().manual_seed(0)).float()
    if form != "huggingface":  # whose processor computes with what it gets
        values[0, :, :4] = torch.nan  # black, as in the encoder
    if form == "onnx":
        found = run_onnx(target, values)
    elif form == "torch_export":
        found = torch.export.load(target).module()(values)
    else:
        by = json.loads((target / "preprocessor_config.json").read_text())
        mean, std = (torch.tensor(by[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))
        found = source.encoder((values * by["rescale_factor"] - mean) / std)
    torch.testing.assert_close(found, ours(source.encoder, values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", some(("safetensors", "onnx", "torch_export", "huggingface"), default=("safetensors",)))
@pytest.mark.parametrize("settings", [SMALL, VIT], ids=["conv_small", "vit_tiny"])
def test_an_encoder_with_adapters(form: str, settings: dict[str, Any], tmp_path: Path):
    source = source_of(tmp_path, settings, adapters=True)
    plain = source_of(tmp_path, settings)
    images = images_like(source.encoder)
    assert not torch.allclose(ours(plain.encoder, images), ours(source.encoder, images), rtol=1e-2)
    target = tmp_path / f"exported{FORMATS[form].ending}"
    assert export(source, form, target) <= formats.TOLERANCE
    torch.testing.assert_close(theirs(form, target, images), ours(source.encoder, images), rtol=1e-4, atol=1e-5)


def test_formats_that_have_no_adapters_reject_them(tmp_path: Path):
    source = source_of(tmp_path, VIT, adapters=True)
    with pytest.raises(InputError, match="this encoder is vit_tiny with adapters; choose format=onnx, torch_export or"):
        export(source, "timm", tmp_path / "x.timm.safetensors")
    source = dataclasses.replace(source, run=read_run(tmp_path))
    message = "adapter.safetensors does not exist: format=peft is for runs with tuning=lora and .*; choose"
    with pytest.raises(InputError, match=message):
        export(source, "peft", tmp_path / "x")


def test_int8_is_smaller_and_near_and_its_numbers_are_whole(graph: Path, tmp_path: Path):
    small, encoder = tmp_path / "int8.onnx", load_encoder(graph.with_name("encoder.pt"))
    quantize(graph, small, images_like(encoder, 64), dynamic=False)
    weights = [one for one in onnx.load(small).graph.initializer if len(one.dims) == 4]
    assert len(weights) == 4
    assert {one.data_type for one in weights} == {onnx.TensorProto.INT8}
    found = compare(graph, small, images_like(encoder, 32), difference=0.0)
    assert found.megabytes == (graph.stat().st_size / 1e6, small.stat().st_size / 1e6)
    assert min(found.seconds) > 0
    h, approximate = (
        torch.from_numpy(onnxruntime.InferenceSession(file).run(None, {"images": images_like(encoder, 32).numpy()})[0])
        for file in (graph, small)
    )
    h, approximate = h.double(), approximate.double()
    cosines = [  # slowly: of each image, both less the mean of fp32
        float((a - h.mean(0)) @ (b - h.mean(0)) / (a - h.mean(0)).norm() / (b - h.mean(0)).norm())
        for a, b in zip(h, approximate, strict=True)
    ]
    assert found.mean_cosine == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
    assert found.min_cosine == pytest.approx(min(cosines), abs=1e-5)
    assert 0.9 < found.min_cosine < 1 - 1e-7


@pytest.mark.parametrize("error", [1e-4, float("nan")])
def test_an_export_that_differs_is_not_written(error: float, tmp_path: Path, monkeypatch, capsys):
    source, file = source_of(tmp_path, SMALL), tmp_path / "encoder.safetensors"
    file.write_text("what was there before")
    sound = FORMATS["safetensors"].run

    def wrong(source: ExportSource, made: Path, images: Tensor) -> Tensor:
        return sound(source, made, images) + (error if len(images) == 1 else 0)

    monkeypatch.setitem(FORMATS, "safetensors", dataclasses.replace(FORMATS["safetensors"], run=wrong))
    with pytest.raises(RunError, match="differ by"):
        export(source, "safetensors", file)
    assert file.read_text() == "what was there before"
    assert {one.name for one in tmp_path.iterdir()} == {"encoder.pt", file.name}
    assert command(monkeypatch, f"encoder={tmp_path / 'encoder.pt'}", "format=safetensors") == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["format=onnx"], "give either run=DIR"),
        (["run={run}"], "the format is missing; add format=NAME, one of safetensors, onnx"),
        (["run={run}", "format=torchscript"], "was removed; choose format=torch_export, or format=onnx"),
        (["run={run}", "format=onx"], "format=onx does not exist; did you mean onnx; choose one of"),
        (["run={run}/nowhere", "format=onnx"], "nowhere does not exist; give the folder"),
        (["run={run}", "format=onnx", "ouput=x"], "ouput=x has no effect on fedssl-export"),
        (["run={run}", "format=onnx", "precision=int4"], "choose precision=fp32 or precision=int8"),
        (["run={run}", "format=onnx", "precision=int8", "rounds=5"], "rounds=5 has no effect on fedssl-export; remove"),
        (["run={run}", "format=timm", "precision=int8"], "precision=int8 is for format=onnx"),
        (["encoder={run}/encoder.pt", "format=onnx", "precision=int8"], "add dataset=NAME"),
        (["run={run}", "format=onnx", "output={run}/encoder.pt"], r"choose a name that ends in \.onnx"),
        (["run={run}", "format=onnx", "output={run}/no/x.onnx"], "in a folder that does not exist; create"),
        (["run={run}", "format=huggingface", "output={run}"], "exists already; choose another target"),
        (["run={run}", "format=timm"], "architectures that timm has .* this encoder is conv_small; choose"),
    ],
)
def test_command_answers_bad_input_with_one_sentence(overrides, message, run: Path, monkeypatch, capsys):
    before = sorted(run.iterdir())
    assert command(monkeypatch, *(word.format(run=run) for word in overrides)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err)
    assert sorted(run.iterdir()) == before


def test_missing_packages_are_named_with_what_installs_them(run: Path, monkeypatch, capsys):
    monkeypatch.setattr(weights, "find_spec", lambda name: None if name in ("onnx", "onnxruntime") else sys)
    assert command(monkeypatch, f"run={run}", "format=onnx", f"output={run}/other.onnx") == 2
    told = "fedssl-export: format=onnx needs onnx and onnxruntime; "
    told += "install it: uv sync --extra export, or pip install onnx onnxruntime\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free disk space"), (errno.EROFS, "make the disk writable")]
)
def test_a_full_disk_is_one_sentence_without_leftovers(tmp_path: Path, monkeypatch, code: int, remedy: str):
    source = source_of(tmp_path, SMALL)

    def full(source: ExportSource, file: Path) -> None:
        file.write_bytes(b"a part of it")
        raise OSError(code, os.strerror(code))

    monkeypatch.setitem(FORMATS, "safetensors", dataclasses.replace(FORMATS["safetensors"], write=full))
    with pytest.raises(InputError, match=rf"cannot be written \({os.strerror(code)}\); {remedy}, or"):
        export(source, "safetensors", tmp_path / "encoder.safetensors")
    assert [one.name for one in tmp_path.iterdir()] == ["encoder.pt"]
