"""Runs that start from the weights of a source: layers, statistics, what clients receive, and resumption."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.config.device_task import compose_task, make_task
from fedssl.config.load import compose, load_settings, parse_client_config
from fedssl.config.saved_run import INITIAL_ENCODER_FILE
from fedssl.datasets.raster import pixel_metadata
from fedssl.encoders import conv_small
from fedssl.errors import InputError, RequestRefused
from fedssl.evaluation.cli import run as evaluate
from fedssl.export import read_content, save_encoder
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_layers
from fedssl.pretrained import loading
from fedssl.pretrained.sources import read_source
from fedssl.runs.loaded_run import load_run_folder
from fedssl.runs.verify import verify_run
from server_app import run_folder
from server_app.build import build_components
from server_app.initial_weights import adopt_statistics
from simulation.grid import simulated_clients
from simulation.run import run
from tests.federation import TINY, Federation
from tests.runs import SMALL, UNTESTED, read_summary

SETTINGS = {"_target_": "fedssl.encoders.conv_small", "channels": 1, "size": 8, "width": 4}


@pytest.fixture
def source(tmp_path) -> Path:
    encoder = conv_small(channels=1, size=8, width=4)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.01)
    save_encoder(tmp_path / "source.pt", encoder, settings=SETTINGS, mean=[0.4], std=[0.2], metadata={})
    return tmp_path / "source.pt"


def test_the_run_starts_from_the_servers_source(source, tmp_path):
    federation = Federation(tmp_path, f"encoder.weights={source}", "num_clients=2")
    initial = federation.components.context.initial_model().layers
    weights = {f"encoder.{name}": value.numpy() for name, value in read_content(source)["weights"].items()}
    random = exchanged_layers(build_method(compose([*TINY, "num_clients=2"]).model))
    assert initial.keys() == random.keys()
    for name, array in initial.items():  # heads are those of the seed
        np.testing.assert_array_equal(array, weights.get(name, random[name]))
    assert any(not np.array_equal(weights[name], random[name]) for name in weights)

    settings = federation.components.settings
    assert (settings.data.mean, settings.data.std) == ((0.4,), (0.2,))
    client = parse_client_config(federation.components.context.client_config)
    assert (client.data.mean, client.data.std, client.model.weights) == ((0.4,), (0.2,), None)
    assert str(source) not in federation.components.context.client_config
    assert "weights" not in federation.components.context.client_config
    assert settings.recording.config.encoder.weights == str(source)  # recorded with the run
    federation.run(1)
    assert len(federation.updates) == 2


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_run_reads_its_source_once(source, tmp_path, monkeypatch, is_folder):
    """Also one that builds its method for the baseline and for the evaluation of rounds in the background."""
    if is_folder:
        (tmp_path / "earlier").mkdir()
        source = source.rename(tmp_path / "earlier" / "encoder.pt").parent
    calls = []
    monkeypatch.setattr(loading, "read_source", lambda name: calls.append(name) or read_source(name))
    options = ["num_clients=2", "rounds=1", "local_epochs=1", "dataset.limit=100", "evaluate_every=1", "partition=iid"]
    options += ["encoder.width=4", "final_evaluation=knn", "evaluation=knn", f"encoder.weights={source}"]
    run([*options, f"output_dir={tmp_path / 'run'}"])
    assert calls == [str(source)]


def test_a_run_with_settings_has_its_initial_encoder(source, tmp_path, monkeypatch):
    """Whenever its process is killed: with settings it can be resumed, and not begun again."""
    found = []
    save = run_folder.save_run
    monkeypatch.setattr(
        run_folder, "save_run", lambda *args: found.append((args[1] / INITIAL_ENCODER_FILE).is_file()) or save(*args)
    )
    run([*SMALL, *UNTESTED, "encoder.width=4", f"encoder.weights={source}", f"output_dir={tmp_path / 'run'}"])
    assert found == [True]


@pytest.mark.heavy
def test_a_run_is_resumed_without_its_source(source, tmp_path):
    """Bit-identical, also its baseline, which is the encoder of the source; reports and evaluations work."""
    folder, again = tmp_path / "run", tmp_path / "again"
    options = ["num_clients=2", "rounds=2", "local_epochs=1", "dataset.limit=100", "snapshot_every=1", "method=byol"]
    options += ["encoder.width=4", "final_evaluation=knn", "engine=local", "partition=iid", "optimizer.lr=0.001"]
    run([*options, f"encoder.weights={source}", f"output_dir={folder}"])
    run([*options, f"encoder.weights={source}", f"output_dir={again}", "pause_after=1"])
    assert (folder / INITIAL_ENCODER_FILE).is_file()
    content = read_content(folder / "encoder.pt")
    assert content["encoder"] == {**SETTINGS, "norm": "batch"}
    assert (content["mean"], content["std"]) == ([0.4], [0.2])
    log = (folder / "run.log").read_text()
    assert f"encoder.weights={source}: 24 tensors with the encoder's names and the prefix weights." in log

    source.unlink()
    run([f"resume={again}"])
    for name, value in read_content(again / "encoder.pt")["weights"].items():
        assert torch.equal(value, content["weights"][name])
    results = [read_summary(each)["final"] for each in (folder, again)]
    assert results[0] == results[1]
    assert results[0]["untrained"]["knn"] > 0
    loaded = load_run_folder(again, [])
    assert loaded.settings.recording.config.encoder.weights == str(source)
    assert (loaded.settings.data.mean, loaded.settings.data.std) == ((0.4,), (0.2,))
    assert loaded.untrained().keys() == loaded.layers(loaded.only_model(loaded.snapshots[-1], figure="")).keys()
    repeat = load_settings([f"resume={again}"])  # once more: the recorded overrides still have the source
    assert f"encoder.weights='{source}'" in repeat.recording.overrides
    assert verify_run(again).problems == ()
    assert "knn" in evaluate([f"run={again}", "evaluation=knn"])

    message = f"was run with encoder.weights={source} \\(now .*other.pt\\); keep the settings"
    with pytest.raises(InputError, match=message):
        load_settings([f"resume={again}", "encoder.weights=other.pt"])
    (again / INITIAL_ENCODER_FILE).write_bytes(b"damaged")
    assert f"{INITIAL_ENCODER_FILE} is damaged" in verify_run(again).problems


def test_an_unsuitable_source_is_refused_before_the_first_round(tmp_path, source):
    options = ["num_clients=2", "rounds=1", "engine=local", f"output_dir={tmp_path / 'run'}"]
    with pytest.raises(InputError, match="have other shapes .*set the encoder that the weights were trained with"):
        run([*options, f"encoder.weights={source}", "encoder.width=8"])
    with pytest.raises(InputError, match="missing.pt does not exist"):
        run([*options, f"encoder.weights={tmp_path / 'missing.pt'}"])
    with pytest.raises(InputError, match="unknown prefix tim"):
        run([*options, "encoder.weights=tim:resnet18"])
    with pytest.raises(InputError, match="encoder.weights=.*/3 does not exist"):
        run([*options, "encoder.weights=3"])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_tasks_of_devices_have_the_statistics_and_not_the_source(source):
    settings = adopt_statistics(compose([f"encoder.weights={source}", "encoder.width=4"]))
    task = make_task(settings)
    assert (task.values["dataset.mean"], task.values["dataset.std"]) == ([0.4], [0.2])
    assert "encoder.weights" not in task.values
    assert str(source) not in task.text()
    hostile = json.dumps({"choices": task.choices, "values": {**task.values, "encoder.weights": "hf:somebody/x"}})
    with pytest.raises(RequestRefused, match="no setting 'encoder.weights' that a server may set"):
        compose_task(hostile)


@pytest.mark.parametrize(
    ("overrides", "mean", "std"),
    [
        ([], (0.4,), (0.2,)),
        (["dataset.mean=[0.1]"], (0.1,), (0.2,)),
        (["dataset.mean=[0.1]", "++dataset.std=[0.3]"], (0.1,), (0.3,)),
    ],
)
def test_overridden_statistics_take_precedence(source, overrides, mean, std, caplog):
    with caplog.at_level(logging.INFO, logger="fedssl"):
        settings = adopt_statistics(compose([f"encoder.weights={source}", *overrides]))
    assert (settings.data.mean, settings.data.std) == (mean, std)
    views = settings.recording.config.augmentation
    assert (tuple(views.mean), tuple(views.std)) == (mean, std)
    (line,) = caplog.messages
    assert ("dataset.mean=[0.4]" in line, "dataset.std=[0.2]" in line) == (mean == (0.4,), std == (0.2,))


@pytest.mark.parametrize(
    ("overrides", "window", "percentiles"),
    [
        ([], [0, 4095], None),
        (["dataset.window=[0,255]"], [0, 255], None),
        (["dataset.percentiles=[1,99]"], None, [1, 99]),
    ],
)
def test_statistics_come_with_the_pixels_they_are_of(source, overrides, window, percentiles, caplog):
    """Means of pixels in a window are not those of other pixels."""
    about = pixel_metadata({"window": [0, 4095], "dtype": "uint16"})
    encoder = conv_small(channels=1, size=8, width=4)
    save_encoder(source, encoder, settings=SETTINGS, mean=[0.4], std=[0.2], metadata=about)
    words = ["dataset=folder", "dataset.path=none", "dataset.channels=1", "dataset.size=8", "encoder.width=4"]
    with caplog.at_level(logging.INFO, logger="fedssl"):
        settings = adopt_statistics(compose([*words, f"encoder.weights={source}", *overrides]))
    reader = settings.data.reader.values
    assert (reader["window"], reader["percentiles"], reader["dtype"]) == (window, percentiles, "uint16")
    assert ("dataset.window=[0, 4095]" in caplog.text) == (not overrides)
    values = make_task(settings).values
    assert (values["dataset.window"], values["dataset.dtype"]) == (window, "uint16")


def test_a_source_that_has_changed_is_read_again(source):
    model = compose([f"encoder.weights={source}", "encoder.width=4"]).model
    before = {name: value.clone() for name, value in build_method(model).encoder.state_dict().items()}
    content = torch.load(source, weights_only=True)
    torch.save({**content, "weights": {name: value + 1 for name, value in content["weights"].items()}}, source)
    after = build_method(model).encoder.state_dict()
    assert all(torch.equal(after[name], value + 1) for name, value in before.items())
    with torch.no_grad():
        for value in after.values():
            value.zero_()
    again = build_method(model).encoder.state_dict()  # training does not change the tensors in memory
    assert all(torch.equal(again[name], value + 1) for name, value in before.items())


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        (["tuning=norm"], True),
        (["tuning=bias"], True),
        ([], False),
        (["tuning=bias", "encoder.weights={source}"], False),
    ],
)
def test_frozen_random_weights_are_told(source, overrides, warns, tmp_path, caplog):
    """Training them in part runs, and the encoder is hardly better than the untrained one."""
    Federation(tmp_path, *(override.format(source=source) for override in overrides))
    assert ("freezes weights of the encoder, which are random" in caplog.text) == warns


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["method=dino"], ["method.freeze_last_layer_rounds"]),
        (["method=dino", "rounds=2"], []),
        (["method=swav", "method.freeze_prototypes_rounds=0", "method.queue_start_round=2"], []),
        (
            ["method=swav", "method.freeze_prototypes_rounds=0", "method.queue_size=8", "method.queue_start_round=2"],
            ["method.queue_start_round"],
        ),
    ],
)
def test_a_run_that_ends_before_a_late_start_warns(overrides, warned, caplog):
    build_components(compose(["rounds=1", "dataset.limit=60", *overrides]), simulated_clients(3))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("what method.")]
    rest = "delays starts in round 2, after the last one (rounds=1); lower it"
    assert lines == [f"what {setting} {rest}" for setting in warned]
