"""Evaluate, export, plot, detect and resume runs on the strict accelerator: equal to the CPU."""

import csv
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples import detection
from fedssl.evaluation import cli as evaluation_cli
from fedssl.export import cli as export_cli
from fedssl.export import load_encoder, save_encoder
from fedssl.export.formats import FORMATS
from fedssl.plots.registry import write_plot
from fedssl.runs.loaded_run import load_run_folder
from fedssl.seeding import torch_generator
from simulation.run import run
from tests.accelerator.device import NAME, limited_memory, recorded
from tests.accelerator.results import assert_equal, numbers_of
from tests.accelerator.test_runs import BASE, OF_A_RUN, run_on_device
from tests.cases import some
from tests.fedssl.export.made import images_like, ours, theirs
from tests.resuming import repeat_from

DEVICE = f"{NAME}:1"  # not the current one: what is created on the current device is on the wrong one
SMALL = [*BASE, "encoder.width=4", "channels_last=false", "method=byol", "strategy=fedu"]
EVALUATIONS = {
    "knn": [],
    "linear": [],
    "few_labels": [],
    "probes": [],
    "fine_tune": ["evaluation.epochs=2"],
    "l_dawa/linear": ["evaluation.epochs=2"],
    "fedu/linear": ["evaluation.epochs=2"],
    "dec_ssl/linear": [],
}
PLOTS = ["landscape", "cka_layers", "forgetting"]


@pytest.fixture(scope="module")
def finished(accelerator, tmp_path_factory) -> Path:
    """A run of three rounds on the accelerator, with snapshots."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    accelerator(run_on_device, [*SMALL, "rounds=3", "snapshot_every=1", f"output_dir={folder}"]).result()
    return folder


def evaluate(folder: Path, name: str, *overrides: str) -> Any:
    """Run ``fedssl-evaluate`` on a copy of a run folder and return what it writes, without paths."""
    copy = shutil.copytree(folder, folder.with_name(f"evaluated-{len(list(folder.parent.iterdir()))}"))
    evaluation_cli.run([f"run={copy}", f"evaluation={name}", "threads=1", *overrides])
    (file,) = (copy / "evaluation").iterdir()
    return {key: value for key, value in json.loads(file.read_text()).items() if key != "encoder"}


@pytest.mark.heavy
@pytest.mark.parametrize("name", some(EVALUATIONS, default=["fine_tune"]))
def test_evaluations_give_the_numbers_of_the_cpu(accelerator, finished, name):
    overrides = [*EVALUATIONS[name], "dataset.limit=400"]
    there = accelerator(evaluate, finished, name, *overrides).result()
    assert there == evaluate(finished, name, *overrides, "device=cpu")


def plot(folder: Path, name: str, *overrides: str) -> Path:
    """Write a plot that loads models and return the file with its numbers."""
    copy = shutil.copytree(folder, folder.with_name(f"plotted-{len(list(folder.parent.iterdir()))}"))
    with recorded() as events:
        file = write_plot(name, load_run_folder(copy, overrides), copy, formats=("png", "csv"))
    assert file is not None
    assert any(event.kind == "to_device" for event in events) == ("device=cpu" not in overrides)
    return file.with_suffix(".csv")


@pytest.mark.heavy
@pytest.mark.parametrize("name", PLOTS)
def test_plots_of_models_have_the_numbers_of_the_cpu(accelerator, finished, name):
    there = accelerator(plot, finished, name).result().read_text()
    assert there == plot(finished, name, "device=cpu").read_text()
    assert len(list(csv.reader(there.splitlines()))) > 2


@pytest.mark.heavy
@pytest.mark.parametrize("form", FORMATS)
def test_exports_where_an_accelerator_is_found(accelerator, finished, form, tmp_path):
    resnet = ["encoder=resnet18"]  # timm has no other encoder
    needs = {"timm": resnet, "huggingface": resnet, "peft": ["tuning=lora", "tuning.rank=2"]}
    folder = finished
    if form in needs:
        folder = tmp_path / "run"
        overrides = [*BASE, *needs[form], "rounds=1", "dataset.limit=30", f"output_dir={folder}"]
        accelerator(run_on_device, overrides).result()
    target = tmp_path / f"exported{FORMATS[form].ending}"
    text = accelerator(export_cli.run, [f"run={folder}", f"format={form}", f"output={target}"]).result()
    encoder = load_encoder(folder / "encoder.pt")
    images = images_like(encoder)
    if form == "peft":
        adapter, factors = load_file(target / "adapter_model.safetensors"), load_file(folder / "adapter.safetensors")
        assert len(factors) > 2
        for name, factor in factors.items():
            assert torch.equal(adapter[f"base_model.model.{name}.weight"].flatten(1), factor)
        return
    if form == "timm":
        names = {}
        exec(text.split("\n", 2)[2], names)
        with torch.no_grad():
            found = names["encoder"](encoder.preprocess(images))
    else:
        found = theirs(form, target, images)
    torch.testing.assert_close(found, ours(encoder, images), rtol=0, atol=1e-5)


@pytest.mark.heavy
def test_an_encoder_of_the_device_is_saved_for_any_host(accelerator, finished, tmp_path):
    h = accelerator(_save_and_represent, finished / "encoder.pt", tmp_path / "encoder.pt").result()
    encoder = load_encoder(tmp_path / "encoder.pt")
    with torch.no_grad():
        assert torch.equal(h, encoder(encoder.preprocess(_images())))


def _images() -> Tensor:
    return torch.arange(4 * 96, dtype=torch.int).to(torch.uint8).view(4, 1, 8, 12)


def _save_and_represent(source: Path, target: Path) -> Tensor:
    encoder = load_encoder(source).to(DEVICE)
    settings = torch.load(source, weights_only=True)["encoder"]
    save_encoder(target, encoder, settings=settings, mean=encoder.mean, std=encoder.std, metadata={})
    with torch.no_grad():
        return encoder(encoder.preprocess(_images().to(DEVICE))).cpu()


def detect(device: str, folder: Path, kind: str) -> list[np.ndarray]:
    """Take a step of a detector on the encoder, then detect; return losses, gradients and detections."""
    torch.manual_seed(0)
    encoder = load_encoder(folder / "encoder.pt")
    model = detection.DETECTORS[kind](encoder, num_classes=4, out_channels=8, regions=16).to(device)
    images, targets = detection.batch(torch_generator(0), 2, channels=1, size=8)
    images = [image.to(device) for image in images]
    model.transform.torch_choice = lambda sizes: sizes[0]  # else drawn on the CPU; proposals are drawn on the device
    torch.manual_seed(0)  # of all devices
    losses = model.train()(images, [{key: value.to(device) for key, value in target.items()} for target in targets])
    sum(losses.values()).backward()
    found = model.eval()(images)
    values = [*losses.values(), *(p.grad for p in model.parameters()), *(v for one in found for v in one.values())]
    return [value.detach().cpu().numpy() for value in values if value is not None]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", detection.DETECTORS)
def test_detectors_give_the_bits_of_the_cpu(accelerator, finished, kind):
    there = accelerator(detect, DEVICE, finished, kind)
    for value, other in zip(detect("cpu", finished, kind), there.result(), strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.heavy
@pytest.mark.parametrize("resumed_on", ["accelerator", "cpu"])
def test_a_resumed_run_ends_with_the_same_numbers(accelerator, finished, resumed_on, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "run")
    for round in (2, 3):
        shutil.rmtree(copy / "models" / f"round-00000{round}")
    repeat = partial(repeat_from, 1, copy)
    again = accelerator(repeat).result() if resumed_on == "accelerator" else repeat("device=cpu")
    assert_equal(numbers_of(again), numbers_of(finished))


@pytest.mark.heavy
def test_images_that_would_fill_the_device_stay_in_host_memory(accelerator, finished, tmp_path):
    overrides = [*SMALL, "rounds=3", "snapshot_every=1", f"output_dir={tmp_path / 'run'}"]
    calls, log = accelerator(_run_with_little_memory, overrides, tmp_path / "run").result()
    assert "stay in host memory" in log
    assert calls > OF_A_RUN
    assert_equal(numbers_of(tmp_path / "run"), numbers_of(finished))


def _run_with_little_memory(overrides: list[str], folder: Path) -> tuple[int, str]:
    with patch.object(torch.accelerator, "get_memory_info", lambda device=None: (0, 2**30)):
        calls = run_on_device(overrides)
    return calls, (folder / "run.log").read_text()


@pytest.mark.heavy
def test_too_little_memory_is_an_error_of_the_client(accelerator, tmp_path):
    reason = accelerator(_run_out_of_memory, [*SMALL, f"output_dir={tmp_path / 'run'}"]).result()
    assert "pretend out of memory" in reason


def _run_out_of_memory(overrides: list[str]) -> str:
    with limited_memory(torch.device(DEVICE), torch.accelerator.memory_allocated(DEVICE) + 100_000):
        try:
            run(overrides)
        except Exception as error:
            return str(error)
    return "no error"
