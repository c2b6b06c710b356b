"""``fedssl-fleet`` and ``fedssl-device`` with a real SuperLink: kits, keys, checks, and what a run recorded."""

import json
import os
import re
import shlex
import stat
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import pytest

from fedssl.errors import InputError
from fedssl.fleet import cli, device_cli, device_files
from fedssl.fleet.kit import make_kit, read_kit, write_kit
from fedssl.methods import base
from fedssl.wire.identity import NodeInfo
from simulation.sweep import acquire_lock
from tests.deploy.test_fleet import check_the_public_port
from tests.devices import write_images
from tests.fleet import DEPLOY, fleet


@pytest.fixture(scope="module")
def running():
    with fleet() as one:
        yield one


@pytest.fixture
def call(running, monkeypatch, capsys):
    """Return a function that calls one of the commands and returns its status and its output."""

    def call(program, *arguments):
        options = ["--address", f"127.0.0.1:{running.port}", "--certificates", str(running.keys / "ca.crt")]
        more = options if program is cli else []
        monkeypatch.setattr("sys.argv", ["program", *map(str, arguments), *more])
        status = program.main()
        return status, "".join(capsys.readouterr())

    return call


@pytest.mark.slow
def test_a_device_joins_with_a_kit_and_leaves(running, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = f"127.0.0.1:{running.public}"
    hint = "create a kit with fedssl-fleet invite, or register a key with fedssl-fleet add"
    assert call(cli, "list") == (0, f"no device is registered; {hint}\n")
    status, text = call(cli, "invite", "garden", "--server", server)
    assert status == 0
    assert "fedssl-fleet add garden garden.pub" in text
    assert "node.key" not in zipfile.ZipFile("garden.kit").namelist()  # the private key is created on the device

    (tmp_path / "empty").mkdir()
    folder = f"folder={tmp_path / 'device'}"
    status, text = call(device_cli, "setup", "garden.kit", "images=empty", folder)
    assert status == 1
    assert f"images      FAILED  {tmp_path / 'empty'} holds no image" in text
    assert not (tmp_path / "device").exists()

    write_images(tmp_path / "images", 5)
    write_images(tmp_path / "images" / "DCIM" / "100APPLE", 2)
    status, text = call(device_cli, "setup", "garden.kit", "images=images", folder)
    assert status == 0, text
    assert f"images      ok  7 in {tmp_path / 'images'}" in text
    assert "connection  ok" in text
    assert device_cli.SHARED.format(quality="") in text
    assert stat.S_IMODE((tmp_path / "device" / "node.key").stat().st_mode) == 0o600
    key = (tmp_path / "device" / "node.key").read_bytes()
    call(device_cli, "setup", "garden.kit", "images=images", folder)
    assert (tmp_path / "device" / "node.key").read_bytes() == key  # kept
    assert call(device_cli, "status", folder)[0] == 0

    public = tmp_path / "device" / "garden.pub"
    assert call(cli, "add", "garden", public)[0] == 0
    status, text = call(cli, "add", "garden", public)
    assert (status, "a device garden is registered already" in text) == (2, True)
    status, text = call(cli, "add", "shed", public)
    assert (status, "rejects the request: Public key already in use" in text) == (2, True)
    rows = json.loads(call(cli, "list", "--json")[1])
    assert [(row["name"], row["status"], row["last contact"]) for row in rows] == [("garden", "registered", None)]

    call(device_cli, "setup", "garden.kit", "images=images", f"folder={tmp_path / 'new'}")
    status, text = call(cli, "rotate", "garden", tmp_path / "new" / "garden.pub")
    assert status == 0
    (row,) = json.loads(call(cli, "list", "--json")[1])
    assert row["node"] != rows[0]["node"]
    assert call(cli, "remove", "garden")[0] == 0
    assert json.loads(call(cli, "list", "--json")[1]) == []
    status, text = call(cli, "remove", "garden")
    assert (status, "no device garden registered" in text) == (2, True)
    assert call(cli, "show", "garden")[1].endswith(
        "no device garden registered; give a name or node ID of `fedssl-fleet list`\n"
    )

    (tmp_path / "roof.pub").write_text("the key of another roof")
    assert call(cli, "invite", "roof", "barn", "--server", server, "--with-key")[0] == 0
    assert (tmp_path / "roof.pub").read_text() == "the key of another roof"
    assert "PRIVATE KEY" in read_kit(tmp_path / "roof.kit").private_key.decode()
    assert stat.S_IMODE((tmp_path / "roof.kit").stat().st_mode) == 0o600
    assert read_kit(tmp_path / "roof.kit").private_key != read_kit(tmp_path / "barn.kit").private_key
    assert {row["name"] for row in json.loads(call(cli, "list", "--json")[1])} == {"roof", "barn"}
    status, text = call(cli, "invite", "a", "b", "--server", server, "--output", "one.kit")
    assert (status, "--output names one kit, but 2 names are given; leave it out" in text) == (2, True)
    assert not (tmp_path / "one.kit").exists()
    assert call(cli, "remove", "roof")[0] == call(cli, "remove", "barn")[0] == 0


SHARED = {  # by the field of the report, the method or the setting that sends it
    "partition": "position",
    "name": "its name",
    "num_images": "the number of its images",
    "free_disk": "free disk space",
    "base_digests": "digests of the base layers",
    "versions": "versions of Python, fedssl, flwr, torch and torchvision",
    "max_rank": "max-rank",
    "problem": "why it cannot train",
    "dataset.mean": "sums and histograms of its pixel values (dataset.mean=federated)",
    "fedca": "projections of single images (fedca)",
    "mar": "latents, with one batch of single images (mar)",
    "orchestra": "cluster centers (orchestra)",
    "fedsc": "the mean product of projections (fedsc)",
    "scaffold": "mean gradients (scaffold)",
}


def test_the_owner_reads_what_leaves_the_device():
    text = " ".join(device_cli.SHARED.split())
    assert [source for source, phrase in SHARED.items() if phrase not in text] == []
    methods = {file.stem for file in Path(base.__file__).parent.glob("*.py") if "uploaded_parts" in file.read_text()}
    assert {field.name for field in fields(NodeInfo)} | methods <= SHARED.keys() | {"partitions", "base"}


def test_devices_reach_only_the_fleet_api(running):
    check_the_public_port(running)


def test_setup_reports_what_does_not_fit(tmp_path, running, call, keys):
    """Another authority's certificate, an unreachable server, and another version of Flower."""
    images = write_images(tmp_path / "images", 3)
    for number, (server, certificate, versions, row) in enumerate(
        [
            ("127.0.0.1:1", running.keys / "ca.crt", {}, "connection  FAILED  127.0.0.1:1 cannot be reached"),
            (f"127.0.0.1:{running.port}", keys / "ca.crt", {}, "connection  FAILED  the certificate of"),
            (
                f"127.0.0.1:{running.port}",
                running.keys / "ca.crt",
                {"flwr": "1.30.0"},
                "versions    FAILED  the server has",
            ),
        ]
    ):
        kit = make_kit("garden", server, certificate=certificate)
        file = tmp_path / f"{number}.kit"
        write_kit(type(kit)(**{**vars(kit), "versions": {**kit.versions, **versions}}), file)
        status, text = call(device_cli, "setup", file, f"images={images}", f"folder={tmp_path / 'device'}")
        assert status == 1
        assert row in text
    assert not (tmp_path / "device").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["setup", "nothing.kit", "images=x"], "nothing.kit does not exist"),
        (["setup", "{file}", "images=x"], "is not a startup kit (File is not a zip file); ask the operator"),
        (["setup", "{file}"], "images=FOLDER is missing"),
        (
            ["setup", "{file}", "pictures=x"],
            "pictures=x is not known; give images=FOLDER or folder=FOLDER or states=FOLDER",
        ),
        (["status", "folder={folder}"], "has no device.json; run fedssl-device setup"),
    ],
)
def test_what_a_device_rejects(arguments, sentence, tmp_path, call):
    (tmp_path / "file").write_text("no kit")
    arguments = [argument.format(file=tmp_path / "file", folder=tmp_path) for argument in arguments]
    status, text = call(device_cli, *arguments)
    assert status == 2
    assert sentence in text


def test_a_report_joins_the_files_of_a_run(tmp_path):
    versions = {"flwr": "1.41.0", "torch": "2.15.0"}
    devices = {"garden": {"node": 5, "images": 9, "versions": versions}}
    devices["shed"] = {"node": 7, "images": 3, "free disk": 812, "versions": {}}
    fleet = {"devices": devices, "rejected": {"8": "has no images"}, "training": [5], "late": [5]}
    (tmp_path / "fleet.json").write_text(json.dumps(fleet))
    (tmp_path / "devices.json").write_text(json.dumps({"garden": 0}))
    row = {"client": 0, "model": "global", "loss": 1.0, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1, "examples": 9}
    row |= {"cosine": {}, "model_cosine": None, "layer_cosine": None, "staleness": 0}
    (tmp_path / "clients.jsonl").write_text("".join(json.dumps({"round": r, **row}) + "\n" for r in (1, 3)))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"round": 2, "dropped": {"0": "it diverged"}}) + "\n")
    reports, activities, rejected = cli.read_reports(tmp_path)
    assert (activities, rejected) == ({}, {8: "has no images"})  # nodes may have been repaired since the end
    known = {"fedssl": "", "flwr": "", "torch": "", "torchvision": "", "python": ""}
    garden = {"images": 9, "free MB": None, "rounds": 2, "last error": "round 2: it diverged"}
    shed = {"images": 3, "free MB": 812, "rounds": 0, "last error": ""}
    assert reports == {"garden": garden | known | versions, "shed": shed | known}
    with acquire_lock(tmp_path):  # the run is active
        assert cli.read_reports(tmp_path)[1] == {5: "training", 8: "rejected"}
        (tmp_path / "fleet.json").write_text(json.dumps(fleet | {"training": []}))
        assert cli.read_reports(tmp_path)[1] == {5: "late", 8: "rejected"}
    for round, last in ((1, "round 2: it diverged"), (3, "round 3: no reply")):  # of an attempt without metrics
        failed = {"0": {"round": round, "reason": "no reply"}}
        (tmp_path / "fleet.json").write_text(json.dumps(fleet | {"failed": failed}))
        assert cli.read_reports(tmp_path)[0]["garden"]["last error"] == last
    with pytest.raises(InputError, match="is not the run folder of a fleet"):
        cli.read_reports(tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        *(("fleet.json", text, "it is not JSON that a run writes") for text in ("", '{"devices"', "[]", "{}", "7")),
        ("fleet.json", '{"devices": {"garden": 1}}', "it is not JSON that a run writes"),
        ("fleet.json", '{"devices": {}, "rejected": {"x": ""}}', "it is not JSON that a run writes"),
        ("metrics.jsonl", '{"round": 1}\n', "line 1 has no dropped"),
        ("clients.jsonl", '{"round": 1}\n', "line 1 has no client"),
    ],
)
def test_a_damaged_file_of_a_run_is_one_sentence(name, content, problem, tmp_path):
    for file, text in {"devices.json": "{}", "fleet.json": '{"devices": {}}', name: content}.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(
        InputError, match=rf"{re.escape(name)} cannot be used \({problem}\); restore it from a copy, or"
    ):
        cli.read_reports(tmp_path)


def test_no_kit_has_an_impossible_server_or_private_key(operator, keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for server, certificate, sentence in (
        ("https://fed.example.org", "ca.crt", "--server=https://fed.example.org is not an address (it has a scheme)"),
        ("fed.example.org:443", "ca.key", "it contains a private key"),
    ):
        status, text = operator("invite", "garden", "--server", server, "--certificates", keys / certificate)
        assert (status, sentence in text) == (2, True), text
    assert list(tmp_path.iterdir()) == []


def test_an_address_replaces_the_connection_of_the_configuration(operator, keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text("damaged")
    (tmp_path / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())
    words = ("invite", "garden", "--server", "127.0.0.1:443")
    assert operator(*words)[0] == 2
    assert operator(*words, "--address", "127.0.0.1:444")[0] == 0
    assert Path("garden.kit").exists()


def test_setup_becomes_the_supernode(running, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    write_kit(make_kit("garden", f"127.0.0.1:{running.public}", certificate=running.keys / "ca.crt"), Path("a.kit"))
    images, folder, started = write_images(tmp_path / "images", 2), tmp_path / "my device", []
    monkeypatch.setattr("os.execvpe", lambda *arguments: started.append(arguments))
    (tmp_path / "empty").mkdir()
    assert call(device_cli, "setup", "a.kit", "images=empty", f"folder={folder}", "--start")[0] == 1
    assert call(device_cli, "setup", "a.kit", f"images={images}", f"folder={folder}")[0] == 0
    assert started == []
    with (folder / "node.env").open("a") as file:
        file.write("# for a GPU\nCUDA_VISIBLE_DEVICES=1\nCACHE=/data/disk#2\n")
    status, text = call(device_cli, "setup", "a.kit", f"images={images}", f"folder={folder}", "--start")
    assert (status, f"Send {folder / 'garden.pub'} to the operator" in text) == (0, True)
    ((program, command, environment),) = started
    *known, option, port = command
    assert known == shlex.split(device_files.command(folder))
    assert program == command[0] == "flower-supernode"
    assert option == "--port"
    assert 1024 <= int(port) < 65536
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["CACHE"]) == ("1", "/data/disk#2")
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert (environment["MALLOC_ARENA_MAX"], environment["MALLOC_TRIM_THRESHOLD_"]) == ("3", "65536")
    unit = (DEPLOY / "systemd" / "fedssl-supernode.service").read_text()
    (line,) = re.findall(r"^Environment=(MALLOC_.*)$", unit, flags=re.MULTILINE)
    assert dict(word.split("=") for word in line.split()) == device_cli.ALLOCATOR


@pytest.fixture
def registered(monkeypatch):
    """The devices of a SuperLink that accepts each name but ``lost``, by node ID."""
    devices = {7: "garden"}

    def register(control, key, *, name):
        if name == "lost":
            raise InputError("no connection")
        devices[max(devices) + 1] = name
        return max(devices)

    monkeypatch.setattr(cli, "_control", lambda options: nullcontext())
    monkeypatch.setattr(cli, "registered_devices", lambda control: [{"name": n, "node": i} for i, n in devices.items()])
    monkeypatch.setattr(cli.control_internals, "register_node", register)
    monkeypatch.setattr(cli.control_internals, "unregister_node", lambda control, node: devices.pop(node))
    return devices


def test_rotation_by_node_keeps_the_name(registered, operator, keys):
    assert operator("rotate", "7", keys / "nodes" / "garden.pub") == (0, "garden is node 8 now; node 7 is removed\n")
    assert registered == {8: "garden"}


def test_kits_are_made_for_all_names_or_none(registered, operator, keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--server", "127.0.0.1:443", "--certificates", keys / "ca.crt", "--with-key")
    (tmp_path / "shed.kit").write_text("")
    status, text = operator("invite", "roof", "shed", *options)
    assert (status, "shed.kit exists; remove it, or leave shed out" in text) == (2, True)
    status, text = operator("invite", "roof", "garden", *options)
    assert (status, "a device garden is registered already" in text) == (2, True)
    assert registered == {7: "garden"}
    assert operator("invite", "lost", *options)[0] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["shed.kit"]  # no kit without a registered key
    assert operator("invite", "roof", *options)[0] == 0
    assert registered == {7: "garden", 8: "roof"}
