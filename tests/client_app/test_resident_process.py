"""The resident process of a device: the same replies as in the ClientApp's process, and none is left behind."""

import copy
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from client_app import app as app_module
from client_app import resident_client
from client_app.resident_client import ResidentProcessError, forward, process_name
from client_app.resident_folder import Supervisor, supervisor_folder
from client_app.resident_process import Abandoned, _check_wanted
from fedssl.config.load import compose
from fedssl.flower_internals import assign_message_id, context_to_bytes, message_to_bytes, set_task_identity
from fedssl.secure_aggregation.client import SECAGG_CONFIG_KEY, STATE
from fedssl.wire.identity import read_node_info
from fedssl.wire.messages import CONFIG, ClientUpdate
from server_app.build import build_run
from server_app.round import Round
from strategies.types import ServerState
from tests.arrays import same
from tests.devices import FORM, Devices, ask, context, write_images
from tests.fleet import until

OVERRIDES = [*FORM, "rounds=3", "local_epochs=1", "encoder.width=4", "strategy=fedbn", "run_id=mine"]
ENDLESS = 100  # local epochs, of which one takes milliseconds; enough for a test to notice that training goes on


def processes(supervisor):
    """Return the ids of the resident processes of a supervisor."""
    found, mark = [], [str(supervisor.pid).encode(), supervisor.start.encode()]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"-P" in arguments and arguments[5:7] == mark and Supervisor.of(int(entry.name)).is_alive():
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="module", autouse=True)
def runtime_folder(tmp_path_factory):
    """Sockets are in a folder of the tests."""
    folder = tmp_path_factory.mktemp("r")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def supervisor():
    """A process in the place of a SuperNode's, with which the resident processes end."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = Supervisor.of(process.pid)
    yield found
    process.communicate(b"\n")
    until(lambda: not processes(found), "the resident process has ended with its supervisor")


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """The context of a device."""
    folder = tmp_path_factory.mktemp("device")
    images = write_images(folder / "images", 6)
    return context(data_path=images, state_path=folder / "states", client_name="a", threads=1, device="cpu")


@pytest.fixture(scope="module")
def plan(device, tmp_path_factory):
    """The content of a genuine message to a device."""
    settings = compose([*OVERRIDES, f"output_dir={tmp_path_factory.mktemp('server') / 'run'}"])
    components = build_run(Devices(copy.deepcopy(device)), settings)
    return Round(components.federation, ServerState()).messages[0].content


def task(plan, **values):
    """Return the plan with other values in its task."""
    content = copy.deepcopy(plan)
    changed = json.loads(str(content.config_records[CONFIG]["settings"]))
    changed["values"] |= values
    content.config_records[CONFIG]["settings"] = json.dumps(changed)
    return content


def message(content, kind="train"):
    set_task_identity()
    made = Message(copy.deepcopy(content), 2, kind)
    assign_message_id(made)
    return made


def layers(reply):
    assert not reply.has_error(), reply.error.reason
    return ClientUpdate.from_content(reply.content, 0).layers


def test_the_client_app_imports_neither_torch_nor_anything_slow():
    program = "import sys, time; import client_app.app; print(sorted(sys.modules))"
    listed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "hydra", "PIL.Image", "scipy", "client_app.handlers"} & set(eval(listed))


def test_replies_are_those_of_the_clientapps_process(plan, device, supervisor, tmp_path):
    """Weights have the same bits in two rounds, although the process keeps the model; errors have the same texts."""
    other = context(**{key.replace("-", "_"): value for key, value in device.node_config.items()})
    other.node_config["state-path"] = str(tmp_path / "states")
    second = copy.deepcopy(plan)
    second.config_records[CONFIG]["round"] = 2
    for content in (plan, second):
        sent = message(content)
        reply = forward(sent, device, supervisor=supervisor)
        expected = ask(content, other)
        assert same(layers(reply), layers(expected))
        assert reply.metadata.reply_to_message_id == sent.metadata.message_id
        assert reply.metadata.dst_node_id == sent.metadata.src_node_id
    [pid] = processes(supervisor)
    train = (task(plan, local_epochs=101), task(plan, run_id="../evil"), RecordDict())
    for content, kind in (*((content, "train") for content in train), (plan, "train.personalized")):
        reason = forward(message(content, kind), device, supervisor=supervisor).error.reason
        assert reason == ask(content, other, kind).error.reason
    reply = forward(message(RecordDict(), "query.node_info"), device, supervisor=supervisor)
    expected = ask(RecordDict(), other, "query.node_info")
    received, correct = read_node_info(reply), read_node_info(expected)
    assert received == replace(correct, free_disk=received.free_disk)  # other programs write between the two
    assert processes(supervisor) == [pid]


@pytest.mark.heavy
def test_images_that_are_added_or_deleted_are_noticed(plan, device, supervisor):
    folder = Path(str(device.node_config["data-path"]))
    added = write_images(folder.with_name("more"), 1, seed=9) / "00.png"

    content = task(plan, run_id="images")

    def images():
        content.config_records[CONFIG]["round"] += 1  # of one run, whose worker is kept
        reply = forward(message(content), device, supervisor=supervisor)
        return ClientUpdate.from_content(reply.content, 0).num_examples

    assert images() == 6
    added.rename(folder / "added.png")
    assert images() == 7
    (folder / "added.png").unlink()
    assert images() == 6


def test_the_state_of_secure_aggregation_comes_back(device, supervisor):
    """The first stage stores the protocol's parameters in the context."""
    from tests.fedssl.secure_aggregation.test_client import SETUP

    used = copy.deepcopy(device)
    reply = forward(message(RecordDict({SECAGG_CONFIG_KEY: ConfigRecord(SETUP)})), used, supervisor=supervisor)
    assert not reply.has_error(), reply.error.reason
    assert used.state.config_records[STATE]["share_num"] == SETUP["share_num"]


def test_only_the_user_can_reach_the_socket(plan, device, supervisor, monkeypatch, runtime_folder):
    forward(message(RecordDict(), "query.node_info"), device, supervisor=supervisor)
    folder = supervisor_folder(supervisor)
    for private in (folder, folder.parent):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(["lock", process_name(device.node_config)])
    other = runtime_folder / "other"
    (other / f"fedssl-{os.getuid()}").mkdir(parents=True, mode=0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    with pytest.raises(ResidentProcessError, match="could not be started; see the log of the device") as caught:
        forward(message(plan), device, supervisor=supervisor)
    assert "must be a folder of this user with mode 700" in str(caught.value.__cause__)


def start_training(plan, device, supervisor):
    """Send a message as a ClientApp does, and return the connection when training has begun."""
    name = f"endless-{time.monotonic_ns()}"
    content = task(plan, local_epochs=ENDLESS, run_id=name)
    connection, _ = resident_client._connect(device.node_config, supervisor, 60.0)
    resident_client.send_frame(connection, context_to_bytes(device))
    resident_client.send_frame(connection, message_to_bytes(message(content)))
    task_file = Path(str(device.node_config["state-path"])) / name / ".task.json"
    until(task_file.exists, "training begins")
    return connection, task_file.parent


@pytest.mark.heavy
@pytest.mark.parametrize("end", ["close", "supersede"])
def test_training_is_abandoned_when_nobody_waits_for_it(end, plan, device, supervisor):
    """The next message does not wait for the end of training, whose state is not saved."""
    connection, run = start_training(plan, device, supervisor)
    pids = processes(supervisor)
    if end == "close":
        connection.close()
    assert layers(forward(message(task(plan, run_id=f"after-{end}")), device, supervisor=supervisor))
    connection.close()
    assert processes(supervisor) == pids
    assert not list(run.rglob("*.safetensors"))


@pytest.mark.heavy
def test_training_ends_with_its_clientapp_or_for_a_newer_message(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as newer:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        here, there = socket.socketpair()
        with here, there:
            _check_wanted(here, listener)
            newer.connect(str(tmp_path / "socket"))
            with pytest.raises(Abandoned, match="a newer message has arrived"):
                _check_wanted(here, listener)
            there.close()
            with pytest.raises(Abandoned, match="its ClientApp has ended"):
                _check_wanted(here, listener)


@pytest.mark.heavy
def test_a_killed_process_is_reported_and_replaced(plan, device, supervisor, caplog, monkeypatch):
    for pid in processes(supervisor):  # so that this process is the parent of the next one, and learns the signal
        os.kill(pid, signal.SIGKILL)
    until(lambda: not processes(supervisor), "no process is left")
    state = Path(str(device.node_config["state-path"])) / "killed" / ".task.json"

    def kill():
        until(state.exists, "training begins")
        for pid in processes(supervisor):
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    monkeypatch.setattr(resident_client, "forward", lambda *args: forward(*args, supervisor=supervisor))
    reply = app_module.app(message(task(plan, local_epochs=ENDLESS, run_id="killed")), device)
    thread.join()
    reason = "the training process of the device was killed (SIGKILL), perhaps for lack of memory"
    assert reply.error.reason == reason
    assert reason in caplog.text
    assert layers(forward(message(task(plan, run_id="works")), device, supervisor=supervisor))


def test_a_process_that_cannot_start_is_reported(device, supervisor, monkeypatch):
    monkeypatch.setattr(resident_client, "_PROGRAM", "raise SystemExit(3)")
    used = copy.deepcopy(device)
    used.node_config["client-name"] = "broken"
    with pytest.raises(ResidentProcessError, match="has failed; see the log of the device"):
        forward(message(RecordDict(), "query.node_info"), used, supervisor=supervisor)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ResidentProcessError, match="could not be started; see the log of the device"):
        forward(message(RecordDict(), "query.node_info"), used, supervisor=supervisor)


def test_an_unexpected_error_does_not_reveal_its_text(device, monkeypatch, caplog):
    def fail(*args):
        raise ValueError("/home/anna")

    monkeypatch.setattr(resident_client, "forward", fail)
    reply = app_module.app(message(RecordDict()), device)
    assert reply.error.reason == "ValueError; see the log of the device"
    assert "/home/anna" in caplog.text


@pytest.mark.heavy
def test_another_configuration_or_app_replaces_the_process(plan, device, supervisor):
    forward(message(RecordDict(), "query.node_info"), device, supervisor=supervisor)
    [first] = processes(supervisor)
    other = copy.deepcopy(device)
    other.node_config["client-name"] = "b"
    reply = forward(message(RecordDict(), "query.node_info"), other, supervisor=supervisor)
    assert reply.content.config_records["node-info"]["name"] == "b"
    until(lambda: len(processes(supervisor)) == 1, "the first process has ended")
    assert processes(supervisor) != [first]


def test_folders_of_ended_supervisors_are_removed(supervisor):
    left = supervisor_folder(Supervisor(4194305, "1"))  # beyond the largest process id
    (left / "lock").touch()
    supervisor_folder(supervisor)
    assert not left.exists()
    assert not Supervisor(os.getpid(), "1").is_alive()  # an id that was used again
    assert Supervisor.of(os.getpid()).is_alive()


def test_app_and_configuration_name_a_process(device, monkeypatch, tmp_path):
    config = dict(device.node_config)
    names = [process_name(config), process_name(config | {"threads": 2})]
    (tmp_path / "conf").mkdir()
    names.append(process_name(config | {"config-dir": str(tmp_path)}))
    (tmp_path / "conf" / "x.yaml").write_text("a: 1")
    names.append(process_name(config | {"config-dir": str(tmp_path)}))
    monkeypatch.setattr(resident_client, "code_fingerprint", lambda: "other")
    names.append(process_name(config))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    names.append(process_name(config))
    monkeypatch.setattr(resident_client, "installed_versions", lambda: {"torch": "2.0.0"})  # upgraded in place
    names.append(process_name(config))
    assert len(set(names)) == 7
