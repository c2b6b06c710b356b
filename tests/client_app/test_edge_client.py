"""A device obeys nobody: whatever a server sends, it does what its own configuration allows, or says why not."""

import copy
import errno
import fcntl
import json
import os
import sys

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from PIL import Image

from client_app.edge_client import EdgeClient, safe_error_message
from client_app.simulated import MARKER_KEY
from fedssl.config.device_task import read_task
from fedssl.config.load import compose
from fedssl.datasets import cache
from fedssl.errors import InputError, RequestRefused
from fedssl.fleet import checks
from fedssl.fleet.history import FILE
from fedssl.fleet.limits import Limits
from fedssl.wire.device import installed_versions
from fedssl.wire.identity import NodeInfo, read_node_info
from fedssl.wire.messages import CONFIG, ClientUpdate, TrainPlan
from server_app.build import build_run
from server_app.round import Round
from strategies.types import ServerState
from tests.devices import FORM, Devices, ask, context, write_images

WORDS = [*FORM, "rounds=3", "local_epochs=1", "encoder.width=4", "strategy=fedbn", "run_id=mine", "batch_size=8"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The content of a genuine message to a device."""
    folder = tmp_path_factory.mktemp("server")
    device = context(data_path=write_images(folder / "images", 6), state_path=folder / "states", client_name="a")
    components = build_run(Devices(device), compose([*WORDS, f"output_dir={folder / 'run'}"]))
    return Round(components.federation, ServerState()).messages[0].content


@pytest.fixture
def node(tmp_path):
    """What the node of a device is configured with."""
    write_images(tmp_path / "images", 6)
    return {"data_path": tmp_path / "images", "state_path": tmp_path / "states", "client_name": "a"}


def changed(plan, **values):
    """The content with other entries of the plan; _ stands for - in their names."""
    content = copy.deepcopy(plan)
    content.config_records[CONFIG].update({key.replace("_", "-"): value for key, value in values.items()})
    return content


def with_task(plan, *, choices=None, **values):
    """The content with another task."""
    task = json.loads(str(plan.config_records[CONFIG]["settings"]))
    task["values"] |= {key.replace("__", "."): value for key, value in values.items()}
    task["choices"] |= choices or {}
    return changed(plan, settings=json.dumps(task))


def refusal(content, node):
    """What the device answers, which must be fit to be sent."""
    reply = ask(content, context(**node))
    assert reply.has_error()
    reason = reply.error.reason
    assert len(reason) <= 300
    assert reason.isprintable()
    assert not any(str(part) in reason for part in (node.get("data_path", "/"), node.get("state_path", "/")))
    return reason


def everything_below(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_a_genuine_plan_is_trained(plan, node, tmp_path):
    before = everything_below(tmp_path)
    reply = ask(plan, context(**node))
    assert not reply.has_error(), reply.error.reason
    update = ClientUpdate.from_content(reply.content, 0)
    assert update.num_examples == 6
    new = [name for name in everything_below(tmp_path) if name not in before]
    of_mine = {f"states/mine{name}" for name in ("", "/a", "/a/round-000001.safetensors", "/.task.json")}
    assert set(new) == {"states", *of_mine, "states/history.jsonl", "states/.usage.json"}


def test_all_images_below_its_folder_are_a_devices_images(plan, node, tmp_path):
    """Partly in subfolders, partly loose, linked, or in folders with the names of splits."""
    images = node["data_path"]
    write_images(images / "DCIM" / "100APPLE", 3, seed=1)
    write_images(images / "train", 2, seed=2)
    write_images(images / "test", 2, seed=3)
    write_images(images / "DCIM" / ".thumbnails", 4, seed=4)
    (images / "more").symlink_to(write_images(tmp_path / "disk", 5, seed=5))
    (images / "DCIM" / "loop").symlink_to(images)
    client = EdgeClient.read(context(**node).node_config)
    assert client.node_info.num_images == 18
    check = next(checks.run_checks(None, images, tmp_path))
    assert (check.passed, check.result.partition(" in ")[0]) == (True, "18")
    reply = ask(plan, context(**node))
    assert not reply.has_error(), reply.error.reason
    assert ClientUpdate.from_content(reply.content, 0).num_examples == 18


def test_a_device_keeps_no_cache_of_earlier_images(plan, node, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MIN_SECONDS_TO_CACHE", 0)
    pictures, outside = tmp_path / "states" / ".pictures", tmp_path / "outside"
    kept = [pictures / "a" / name for name in ("targets", "locked-0123456789abcdef", "link-0123456789abcdef-encoded")]
    for folder in (outside, *kept[:2], pictures / "b" / "x-0123456789abcdef", pictures / "a" / "cut-0123456789abcdef"):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    kept[2].symlink_to(outside)
    with (kept[1] / "lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        for round in (1, 2):
            write_images(node["data_path"] / f"{round}", 1, seed=round)
            assert not ask(changed(plan, round=round), context(**node)).has_error()
    (current,) = set((pictures / "a").iterdir()) - set(kept)
    assert (current / "about.npz").exists()
    assert all((folder / "lock").exists() for folder in (*kept, pictures / "b" / "x-0123456789abcdef"))


def test_a_round_removes_partial_files_of_ended_processes(plan, node, tmp_path):
    states, left = tmp_path / "states", ".round-000001.pt.99999999.partial"
    for folder in ("mine/a", "base", "encoders/mine"):
        (states / folder).mkdir(parents=True)
        (states / folder / left).touch()
    running = states / "mine" / "a" / f".round-000001.pt.{os.getppid()}.partial"
    running.touch()
    assert not ask(plan, context(**node)).has_error()
    assert list(states.rglob("*.partial")) == [running]


FULL = "seed: 0\nrun_id: x\naugmentation:\n  _target_: numpy.testing.runstring\n"
ATTEMPTS = {
    "settings in full": (lambda plan: changed(plan, settings=FULL), "the task is not JSON"),
    "a class": (lambda plan: with_task(plan, augmentation___target_="os.mkdir"), "no setting 'augmentation._target_'"),
    "a class in a value": (lambda plan: with_task(plan, clip_norm={"_target_": "antigravity.x"}), "the key '_target_'"),
    "an interpolation": (lambda plan: with_task(plan, encoder__width="${oc.env:HOME}"), "width has an interpolation"),
    "a path": (lambda plan: with_task(plan, dataset__path="/"), "no setting 'dataset.path'"),
    "a run outside": (lambda plan: with_task(plan, run_id="../../evil"), "is not a valid run id"),
    "a choice": (
        lambda plan: with_task(plan, choices={"encoder": "x"}),
        "encoder=x is not a choice of this edge client",
    ),
    "a group": (lambda plan: with_task(plan, choices={"dataset": "digits"}), "the task must choose in"),
    "a batch of nothing": (
        lambda plan: with_task(plan, batch_size=0),
        "batch_size=0 must be an integer of at least 2; the default is 64",
    ),
    "a large batch": (lambda plan: with_task(plan, batch_size=2048), "batch_size=2048 but this device allows 1024"),
    "many epochs": (lambda plan: with_task(plan, local_epochs=101), "local_epochs=101 but this device allows 100"),
    "large images": (lambda plan: with_task(plan, dataset__size=10**6), "dataset.size is beyond 65536"),
    "larger images": (lambda plan: with_task(plan, dataset__size=513), "dataset.size=513 but this device allows 512"),
    "large views": (
        lambda plan: with_task(plan, augmentation__size=5000),
        "augmentation.size=5000 must be at most 4,096",
    ),
    "a large model": (lambda plan: with_task(plan, encoder__width=60_000), "a training step takes about"),
    "large heads": (
        lambda plan: with_task(plan, method__projector__hidden_dim=65_536, method__projector__num_layers=256),
        "a training step takes about",
    ),
    "other code": (lambda plan: changed(plan, code_fingerprint="evil"), "the client runs other code"),
    "a round that never was": (lambda plan: changed(plan, round=-1), "round=-1 of the plan is not from 1"),
    "no end of rounds": (lambda plan: changed(plan, round=10**9), "round=1000000000 of the plan"),
    "keep nothing": (
        lambda plan: changed(plan, oldest_resumable_round=7),
        "oldest-resumable-round=7 of the plan is not from 0 to 1",
    ),
    "no number": (lambda plan: changed(plan, lr_factor=float("nan")), "lr-factor=nan of the plan"),
    "a depth": (lambda plan: changed(plan, num_stages=10**6), "num-stages=1000000 of the plan is not from 1 to 256"),
    "frozen beyond": (
        lambda plan: changed(plan, num_stages=1, num_frozen_stages=2),
        "num-frozen-stages=2 of the plan is not from 0 to 1",
    ),
    "what is private": (lambda plan: changed(plan, upload_names="\nencoder.x"), "layer 'encoder.x' was asked for"),
    "no plan": (lambda plan: RecordDict(), "KeyError; see the log of the device"),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_a_hostile_server_sends_is_refused_in_a_sentence(name, plan, node, tmp_path, monkeypatch):
    make, sentence = ATTEMPTS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    before, modules = everything_below(tmp_path), set(sys.modules)
    assert sentence in refusal(make(plan), node)
    written = [file for file in everything_below(tmp_path) if file not in before]
    assert all(file.startswith("states") and not file.endswith(".safetensors") for file in written)
    assert not {"antigravity", "numpy.testing"} & (set(sys.modules) - modules)


def test_its_history_never_stops_a_device(plan, node, tmp_path):
    """A long text of a server makes the file no longer than it may be, and a damaged file begins anew."""
    refusal(changed(plan, upload_names="\n" + 5_000_000 * "x"), node)
    assert not ask(plan, context(**node)).has_error()
    file = tmp_path / "states" / FILE
    assert len(file.read_text().splitlines()) == 3
    file.write_bytes(b"\xff")
    assert not ask(plan, context(**node)).has_error()
    assert len(file.read_text().splitlines()) == 2


def test_another_runs_states_are_never_read_or_dropped(plan, node, tmp_path):
    assert not ask(plan, context(**node)).has_error()
    kept = tmp_path / "states" / "mine" / "a" / "round-000001.safetensors"
    before = kept.read_bytes()
    # The same run under other settings, which would send up what FedBN keeps.
    reason = refusal(changed(with_task(plan, choices={"strategy": "fedavg"}), round=2, oldest_resumable_round=2), node)
    assert reason == "run_id=mine is another run here, with other settings; settings of a run do not change"
    other = changed(with_task(plan, run_id="other"), round=3, oldest_resumable_round=3)
    assert not ask(other, context(**node)).has_error()
    assert kept.read_bytes() == before
    assert not ask(changed(with_task(plan, rounds=9), round=2), context(**node)).has_error()  # it may go on for longer


def test_a_run_goes_on_after_an_upgrade_that_added_settings(plan, node, tmp_path):
    """Its task was stored by a version without clip_norm, which has its default now."""
    assert not ask(plan, context(**node)).has_error()
    file = tmp_path / "states" / "mine" / ".task.json"
    task = json.loads(file.read_text())
    del task["values"]["clip_norm"]
    file.write_text(json.dumps(task, sort_keys=True))
    assert not ask(changed(plan, round=2), context(**node)).has_error()
    other = "run_id=mine is another run here, with other settings; settings of a run do not change"
    assert refusal(changed(with_task(plan, clip_norm=2.0), round=3), node) == other
    task["values"]["renamed_since"] = 1
    file.write_text(json.dumps(task, sort_keys=True))
    assert refusal(changed(plan, round=3), node) == other


@pytest.mark.parametrize(("allowed", "storage"), [(767, "encoded"), (768, "decoded")])
def test_images_of_16_bits_need_two_bytes_per_value(allowed, storage, plan, tmp_path, monkeypatch):
    """Six images of one channel and 8 x 8 pixels: 6 * 64 * 2 = 768 bytes."""
    for number in range(6):
        Image.fromarray(np.full((8, 8), 300 * number, np.uint16)).save(tmp_path / f"{number}.png")
    client = EdgeClient.read({"data-path": str(tmp_path), "state-path": str(tmp_path / "states")})
    monkeypatch.setattr(Limits, "memory_bytes", lambda limits: allowed)
    task = read_task(TrainPlan.from_content(plan).settings, states=tmp_path, folders=())
    settings = client._with_local_settings(task, num_images=6)
    assert settings.data.reader.values["storage"] == storage


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "this SuperNode has no folder of images; start it with --node-config 'data-path=\"FOLDER\"'"),
        ({"partition-id": 0, "num-partitions": 2}, "this SuperNode has no folder of images"),
        (
            {MARKER_KEY: True, "partition-id": 0, "num-partitions": 2},
            "the node's configuration has fedssl-simulation; known are",
        ),
        ({"data-path": "x", "state": "y"}, "the node's configuration has state; known are data-path, client-name"),
        ({"data-path": "x", "client-name": "../x"}, "InputError; see the log of the device"),
        ({"data-path": "x", "client-name": "a b"}, "client-name='a b' is not a valid client name"),
        ({"data-path": "x", "threads": 0}, "threads=0 of the node's configuration must be an integer of at least 1"),
        ({"data-path": "x", "max-rank": 0}, "max-rank=0 of the node's configuration must be an integer of at least 1"),
        ({"data-path": "x", "device": "tpu"}, "device=tpu but torch has cpu"),
        ({"data-path": "x", "limits": "/nowhere"}, "InputError; see the log of the device"),
    ],
)
def test_a_node_that_is_configured_wrongly_says_so(config, sentence, plan):
    device = Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config={})
    for kind, content in (("query.node_info", RecordDict()), ("train", plan)):
        assert sentence in ask(content, device, kind).error.reason


def test_who_a_device_is(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "-Büro 2.lan")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert EdgeClient.read({"data-path": "x"}).states == tmp_path / "fedssl"
    images = write_images(tmp_path / "images", 3)
    monkeypatch.setattr("client_app.edge_client.free_space", lambda folder: 2_999_999)
    own = {"num_images": 3, "free_disk": 2, "versions": installed_versions()}
    for config, who in (
        ({}, NodeInfo(partition=None, name="B-ro-2.lan", **own)),
        ({"partition_id": 4}, NodeInfo(partition=4, name="B-ro-2.lan-4", **own)),
        ({"client_name": "roof", "partition_id": 4}, NodeInfo(partition=4, name="roof", **own)),
        (
            {"client_name": "roof", "secure_aggregation_only": True},
            NodeInfo(partition=None, name="roof", **own | {"num_images": None}),
        ),
        ({"client_name": "roof", "max_rank": 4}, NodeInfo(partition=None, name="roof", max_rank=4, **own)),
    ):
        assert read_node_info(ask(RecordDict(), context(data_path=images, **config), "query.node_info")) == who
    assert EdgeClient.read({"data-path": "x", "partition-id": 4}).number == 4
    assert EdgeClient.read({"data-path": "x", "client-name": "a"}).number > 2**31


def test_what_is_told_of_an_error():
    full = OSError(errno.ENOSPC, "a text with /home/anna", "/home/anna")
    assert safe_error_message(full) == "OSError (No space left on device); see the log of the device"
    no_cache = InputError("/home/anna/.pictures has no room")
    assert safe_error_message(no_cache) == "InputError; see the log of the device"
    no_cache.__cause__ = full
    assert safe_error_message(no_cache) == "InputError (No space left on device); see the log of the device"
    assert safe_error_message(ValueError("secret")) == "ValueError; see the log of the device"
    refusal = RequestRefused("method=fedu/byol\x1b[2J\n" + "x" * 500)
    assert safe_error_message(refusal) == "method=fedu/byol [2J " + "x" * 279


def test_unusable_images_are_named_on_the_device_alone(plan, node, tmp_path, caplog):
    bad = node | {"data_path": tmp_path / "nowhere"}
    assert refusal(plan, bad) == "the device has no images: its data-path does not exist"
    ask(RecordDict(), context(**bad), "query.node_info")
    assert f"its data-path does not exist (data-path={tmp_path / 'nowhere'})" in caplog.text
