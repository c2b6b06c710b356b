"""Settings and pickles of others select no code: a marker is planted in everything that the program reads."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from client_app.edge_client import _is_same_task
from fedssl.config.device_task import compose_task, make_task
from fedssl.config.load import compose, load_settings, parse_client_config
from fedssl.config.overrides import quote_value
from fedssl.config.saved_run import save_run
from fedssl.csv_file import read_rows
from fedssl.errors import InputError, RequestRefused
from fedssl.evaluation.cli import compose_evaluation
from fedssl.export import load_encoder, read_content
from fedssl.export.weights import write_safetensors
from fedssl.fleet.encoders import load_delivered, store_encoder
from fedssl.fleet.kit import read_kit
from fedssl.fleet.limits import read_limits
from fedssl.methods.teacher import build_teacher
from fedssl.partition import from_file
from fedssl.plain_values import plain_values
from fedssl.pretrained.checkpoints import read_checkpoint
from fedssl.runs.catalog import differences_from_defaults
from fedssl.runs.loaded_run import load_run_folder
from fedssl.runs.representations import read_representations
from fedssl.runs.run import read_run, strategy_of
from fedssl.safe_io import read_tensors
from fedssl.tensor_file import read_arrays
from fedssl.wire.delivery import EncoderDelivery
from simulation.sweep_state import plan_jobs
from strategies.topology import read_edges
from tests.fedssl.partition.made import partition_input
from tests.fedssl.test_safe_io import Calls
from tests.methods import teacher_file

SECRET = "a5f1d29c77"
DISTILLATION = ["method=distillation", "num_clients=2"]


def planted(marker):
    """Return values that run code or read the environment if Hydra or OmegaConf gets them."""
    calls = [{"_target_": "os.mkdir", "path": marker}, {"_target_": "os.mkdir", "_args_": [marker]}]
    calls += [{"_target_": "torch.load", "f": f"{marker}.pickle", "weights_only": False}]
    calls += [{"_target_": "pathlib.Path", "_args_": [marker], "_partial_": True}, {"_call_": True}, {"x${seed}": 1}]
    return [*calls, "${oc.env:SECRET}", "a\\${oc.env:SECRET}", {"_target_": "fedssl.encoders.resnet50"}]


def typical(marker):
    """Return a call, one that is nested deeply, and an interpolation; `plain_values` is tested with all."""
    call, *_ = values = planted(marker)
    return [call, {"a": [{"b": {"c": [[call]]}}]}, values[6]]


@pytest.fixture
def marker(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    (tmp_path / "marker.pickle").write_bytes(pickle.dumps(Calls(os.mkdir, str(tmp_path / "marker"))))
    return str(tmp_path / "marker")


def refused(use, marker):
    """Assert that a reader refuses in one sentence, and neither calls nor resolves anything."""
    with pytest.raises((InputError, RequestRefused)) as caught:
        use()
    assert not Path(marker).exists()
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def not_used(use, marker):
    """Assert that a reader neither calls nor resolves anything; it may refuse, or use the value as text."""
    try:
        result = str(use())
    except (InputError, RequestRefused, ValueError, zipfile.BadZipFile) as error:
        result = str(error)
    assert not Path(marker).exists()
    assert SECRET not in result


def test_plain_values(marker):
    for value in planted(marker):
        for nested in (value, [value], {"a": value}, {"a": [{"b": {"c": [[value]]}}]}):
            with pytest.raises(ValueError, match=r"interpolation|the key '_"):
                plain_values(nested, "x")
    deep: list[object] = []
    for _ in range(40):
        deep = [deep]
    for value in (deep, ["a" * 2**21] * 3, {1.5: 2}, {"a": b""}, {"a": {3}}, torch.ones(1), "???"):
        with pytest.raises(ValueError, match=r"^x"):
            plain_values(value, "x")
    good = {"a": [None, True, 1, 2.5, "$x {y} _z"], "b": {"c_": {}, 3: 4}}
    assert plain_values(good, "x") == good


def encoder_with(file, part, value):
    """Write an encoder's file with a planted value."""
    content = torch.load(teacher_file(), weights_only=True)
    if part == "adapters":
        content |= {"format": "fedssl-encoder-2", "adapters": {"bottleneck": value, "blocks": 1}}
    elif part == "metadata":
        content["metadata"]["x"] = value
    else:
        content["encoder"][part] = value
    if file.suffix == ".pt":
        torch.save(content, file)
    else:
        write_safetensors(file, content)
    return file


def delivered(file, states):
    delivery = EncoderDelivery(run_id="r", round=1, model="global", content=file.read_bytes())
    return store_encoder(delivery, states, authority=None)


ENCODER_READERS = {
    "teacher": lambda file: compose([*DISTILLATION, f"teacher={file}"]),
    "load_encoder": load_encoder,
    "delivered to a device": load_delivered,
    "delivered by a server": lambda file: delivered(file, file.parent / "states"),
    "exported": read_content,
}


@pytest.mark.parametrize("reader", ENCODER_READERS)
def test_an_encoder_file(reader, marker, tmp_path):
    values = typical(marker)
    parts = [("x", value) for value in values] + [(part, values[0]) for part in ("norm", "adapters", "metadata")]
    parts += [("_target_", name) for name in ("os.mkdir", "fedssl.encoders.Encoder", "fedssl.encoders.factory._vit")]
    for number, (part, value) in enumerate(parts):
        file = encoder_with(tmp_path / ("encoder.pt" if number % 2 else "encoder.safetensors"), part, value)
        refuses = reader != "exported" or part != "_target_"  # an export compares the name later
        (refused if refuses else not_used)(lambda file=file: ENCODER_READERS[reader](file), marker)


def test_the_description_of_a_teacher(marker):
    description = {"encoder": "os.mkdir", "arguments": {"channels": 1, "size": 8}, "mean": [0.1], "std": [1.0]}
    refused(lambda: build_teacher(description), marker)


@pytest.fixture
def folder(tmp_path):
    """A run folder whose settings files agree."""

    def make(*overrides, change=lambda config: None):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        save_run(compose(["num_clients=2", *overrides]).recording, folder)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        change(config)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "models" / "round-000001").mkdir(parents=True, exist_ok=True)
        return folder

    return make


RUN_READERS = {
    "resume": lambda folder: load_settings([f"resume={folder}"]),
    "figures": lambda folder: load_run_folder(folder, []),
    "evaluate": lambda folder: compose_evaluation([], run=folder),
}


@pytest.mark.parametrize("reader", RUN_READERS)
def test_config_yaml(reader, folder, marker):
    for value in typical(marker):
        run = folder(change=lambda config, value=value: config["dataset"].update(splits={"train": value}, x=value))
        refused(lambda run=run: RUN_READERS[reader](run), marker)
        not_used(lambda run=run: differences_from_defaults(read_run(run)), marker)
    run = folder(change=lambda config: config["dataset"].update(_target_="os.mkdir"))
    refused(lambda: RUN_READERS[reader](run), marker)


@pytest.mark.parametrize("reader", ["resume", "figures"])
def test_overrides_yaml(reader, folder, marker):
    run = folder()
    for value in typical(marker):
        override = f"+x={quote_value(value) if isinstance(value, str) else json.dumps(value)}"
        for saved in ([override], ["+teacher={a: 1}"], [override.replace("+x", "method.teacher_encoder")]):
            (run / "overrides.yaml").write_text(yaml.safe_dump(saved))
            refused(lambda: RUN_READERS[reader](run), marker)


@pytest.mark.parametrize("reader", ["resume", "figures"])
def test_a_teacher_in_a_run_folder_whose_files_agree(reader, folder, marker, tmp_path):
    file = tmp_path / "t.pt"
    for value in typical(marker):

        def change(config, value=value):
            config["method"]["teacher_encoder"]["arguments"]["x"] = value

        shutil.copy(teacher_file(), file)
        run = folder(*DISTILLATION, f"teacher={file}", change=change)
        encoder_with(file, "x", value)
        refused(lambda run=run: RUN_READERS[reader](run), marker)


def test_sweep_yaml(marker, tmp_path):
    for value in typical(marker):
        text = f"x={quote_value(value) if isinstance(value, str) else json.dumps(value)}"
        for content in (
            {"overrides": [f"+{text}"], "jobs": {}},
            {"overrides": [], "jobs": {"0": [f"+{text}"]}},
            {"overrides": [], "jobs": {}, "options": [f"+sweep.{text}"]},
            {"overrides": [], "jobs": {}, "options": [f"sweep.metric={text.partition('=')[2]}"]},
        ):
            (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))
            refused(lambda: plan_jobs(tmp_path, ["seed=0,1"]), marker)


def test_a_task_for_a_device(marker):
    task = json.loads(make_task(compose(["dataset=cifar10", "method=byol"])).text())
    keys = ("encoder.width", "method.projector", "encoder._target_")
    for key, value in zip(keys, typical(marker), strict=True):
        text = json.dumps({**task, "values": {**task["values"], key: value}})
        refused(lambda text=text: compose_task(text), marker)
        assert not _is_same_task(text, json.dumps(task), rounds=1, folders=())
        choices = {**task["choices"], "encoder": value}
        refused(lambda choices=choices: compose_task(json.dumps({**task, "choices": choices})), marker)


@pytest.mark.parametrize("text", ["${oc.env:SECRET}", "???", "\\${oc.env:SECRET}"])
def test_the_settings_of_a_simulated_client(text, marker):
    content = yaml.safe_load(compose([]).client_yaml)
    for key in ("device", "output_dir", "run_id"):
        with pytest.raises(ValueError, match="interpolation|missing value"):
            parse_client_config(yaml.safe_dump({**content, key: text}))


def test_text_of_the_users_own_command_is_resolved_once(monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("OUTER", "${oc.env:SECRET}")
    assert compose(["output_dir=${oc.env:SECRET}"]).recording.config.output_dir.endswith(SECRET)
    for text in ("\\${oc.env:SECRET}", "${oc.env:OUTER}"):
        message = r"settings.output_dir has an interpolation, \$\{...\}, which is not"
        with pytest.raises(InputError, match=message) as caught:
            compose([f"output_dir='{text}'"])
        assert SECRET not in str(caught.value)


def text_file(read):
    """A reader of a text file, with a planted value as YAML, JSON, CSV or a line."""

    def use(folder, value):
        for text in (yaml.safe_dump({"a": value}), json.dumps(value), f"client,label\n0,{value}\n", f"0 {value}\n"):
            (folder / "file").write_text(text)
            yield lambda: read(folder / "file")

    return use


TEXT_READERS = {
    "limits of a device": read_limits,
    "partition": lambda file: from_file(partition_input(None, num_images=1, num_clients=2), file=file),
    "trace": lambda file: list(read_rows(file, "client,label", setting="file", content="of labels")),
    "topology": lambda file: read_edges(file, 2),
    "kit": read_kit,
}


@pytest.mark.parametrize("reader", TEXT_READERS)
def test_text_files(reader, marker, tmp_path):
    for value in typical(marker):
        for use in text_file(TEXT_READERS[reader])(tmp_path, value):
            not_used(use, marker)


RUN_FILES = ("summary.json", "choices.yaml", "metrics.jsonl", "clients.jsonl", "devices.json", "fleet.json")


def test_files_of_a_run(folder, marker):
    run = folder()
    for value in typical(marker):
        content = {"status": "finished", "reason": None, "overrides": [f"+x={value}"], "final": {}, "strategy": value}
        for name in RUN_FILES:
            (run / name).write_text(json.dumps(content) + "\n")
        not_used(lambda: (read_run(run).all_settings, strategy_of(run), read_run(run).rounds_done), marker)
        not_used(lambda: differences_from_defaults(read_run(run)), marker)


PICKLE_READERS = {
    "own files": (read_tensors, True),
    "pretrained weights": (read_checkpoint, True),
    "an encoder": (load_encoder, True),
    "arrays": (read_arrays, False),
    "representations": (lambda file: read_representations(file.parent), False),
}


@pytest.mark.parametrize("reader", PICKLE_READERS)
def test_pickles(reader, marker, tmp_path):
    read, of_torch = PICKLE_READERS[reader]
    file = tmp_path / ("encoder.pt" if of_torch else "representations.npz")
    for value in (Calls(os.mkdir, marker), {"a": [{"b": [Calls(os.mkdir, marker)]}]}):
        if of_torch:
            for zipped in (True, False):
                torch.save({"w": torch.ones(2), "x": value}, file, _use_new_zipfile_serialization=zipped)
                not_used(lambda: read(file), marker)
        else:
            np.savez(file, x=np.array([value], dtype=object))
            not_used(lambda: read(file), marker)
    for protocol in (0, 2, 4):
        file.write_bytes(pickle.dumps(Calls(os.mkdir, marker), protocol))
        not_used(lambda: read(file), marker)


def test_metadata_of_safetensors_files(marker, tmp_path):
    for value in typical(marker):
        save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", {"fedssl": json.dumps({"mean": value, "x": value})})
        not_used(lambda: read_checkpoint(tmp_path / "a.safetensors"), marker)
