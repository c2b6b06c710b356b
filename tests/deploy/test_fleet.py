"""Real fleets on this machine with TLS, node keys, a proxy and local images, and their failures."""

import json
import os
import shlex
import signal
import ssl
import tarfile
import urllib.error
import urllib.request
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from client_app.resident_folder import Supervisor
from simulation.run import run as simulate
from tests.devices import SMALL, write_images
from tests.fedssl.datasets.dicom_files import make
from tests.fleet import PATIENCE, fleet, until
from tests.runs import model_bits

SEEDED = [*SMALL, "seed=3"]


@pytest.fixture
def image_folders(tmp_path):
    """Folders with different numbers of images for three owners."""
    folder = tmp_path / "images"
    return {name: write_images(folder / name, 9 + index, seed=index) for index, name in enumerate("abc")}


def partitions(run):
    """Return the owner of each partition, identified by the number of images."""
    table = (run / "partition.csv").read_text().splitlines()[1:]
    sizes = [int(line.split(",")[1]) for line in table]
    return {"abc"[size - 9]: number for number, size in enumerate(sizes)}


def post(port, path, keys):
    """Return the status of the reply to a request."""
    context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", data=b"", method="POST")
    try:
        with urllib.request.urlopen(request, context=context) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def sources(image_folders, tmp_path):
    """The images of three owners as a shard, a manifest and DICOM files."""
    shard, manifest, scans = tmp_path / "shard-000.tar", tmp_path / "manifest.csv", tmp_path / "scans"
    with tarfile.open(shard, "w") as archive:
        for file in sorted(image_folders["a"].iterdir()):
            archive.add(file, file.name)
    lines = [f"{file},patient {file.stem}" for file in sorted(image_folders["b"].iterdir())]
    manifest.write_text("\n".join(["path,group", *lines]))
    scans.mkdir()
    for file in sorted(image_folders["c"].iterdir()):
        (scans / file.stem).write_bytes(make(np.asarray(Image.open(file)), bits=8))
    return {"a": shard, "b": manifest, "c": scans}


@pytest.mark.heavy
def test_a_fleet_and_the_simulation_are_bit_identical(image_folders, sources, tmp_path):
    """The simulation has the same images as folders of PNG files."""
    overrides = [*SEEDED, "strategy=fedu", "method=byol", "rounds=2"]
    own = [f"dataset.path={tmp_path / 'images'}", "dataset.folders=owner", "partition=natural", "num_clients=3"]
    simulate([*overrides, *own, f"output_dir={tmp_path / 'simulation'}"])
    numbers = partitions(tmp_path / "simulation")
    with fleet(*sources) as running:
        for name, path in sources.items():
            running.start_node(
                name, data_path=path, client_name=name, state_path=tmp_path / name, partition_id=numbers[name]
            )
        running.start_node("stranger", data_path=image_folders["a"])
        running.wait_for_nodes(3)
        status, output = running.run(*overrides, "num_clients=3", f"output_dir={tmp_path / 'fleet'}")
        assert status == 0, output
        assert f"the run folder is {tmp_path / 'fleet'}\n" in output
        refused(running)  # no client trained on its images
        [resident] = running.working("a")  # one for all rounds
        process = Supervisor.of(resident)
        running.nodes["a"].terminate()
        running.nodes["a"].wait()
        until(lambda: not process.is_alive(), "the resident process has ended with its SuperNode")
        check_the_public_port(running)
    assert model_bits(tmp_path / "simulation") == model_bits(tmp_path / "fleet")
    assert json.loads((tmp_path / "fleet" / "devices.json").read_text()) == numbers


def check_the_public_port(running):
    """Only the operator's port can register keys and submit runs."""
    for path in ("start-run", "register-node", "stop-run", "list-runs"):
        for public in (f"/v1/control/{path}", f"/v1/fleet/../control/{path}", f"/v1/fleet/%2e%2e/control/{path}"):
            assert post(running.public, public, running.keys) == 403
        assert post(running.port, f"/v1/control/{path}", running.keys) != 403
    assert post(running.public, "/v1/runtime/acquire-task", running.keys) == 403
    assert post(running.public, "/v1/fleet/pull-messages", running.keys) != 403


def refused(running):
    """An unregistered node is rejected and ends."""
    assert running.nodes["stranger"].wait(timeout=PATIENCE) == 1
    assert "Failed to activate SuperNode" in running.log("stranger")


def rows(run, name="metrics.jsonl"):
    """Return the lines of a file of the run folder."""
    text = (run / name).read_text() if (run / name).exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def took_part(run, client, *, after):
    """Return whether an update of the client was used in a later round."""
    return any(row["client"] == client and row["round"] > after for row in rows(run, "clients.jsonl"))


@pytest.mark.heavy
def test_a_run_survives_failures_of_its_devices(image_folders, tmp_path):
    run = tmp_path / "run"
    overrides = [*SEEDED, "num_clients=4", "rounds=1000", f"output_dir={run}", "aggregation.min_updates=1"]
    overrides += ["aggregation.round_deadline=60", "aggregation.max_retries=50"]
    image_folders["d"] = tmp_path / "nowhere"
    (tmp_path / "limits.yaml").write_text("memory: 0.000001")  # c refuses every message
    with fleet(*image_folders) as running:
        start = {name: {"data_path": folder, "client_name": name} for name, folder in image_folders.items()}
        start["c"]["limits"] = tmp_path / "limits.yaml"
        for name in image_folders:
            running.start_node(name, **start[name])
        running.wait_for_nodes(4)
        fedssl = running.submit(*overrides)

        def last():
            assert fedssl.poll() is None, fedssl.communicate()[0]
            return len(rows(run))

        def signal_clients(number):
            for pid in running.working("a"):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        def missed():  # one that is stopped after its reply is not missed, but so is the next one
            signal_clients(signal.SIGSTOP)
            return any("0" in row["dropped"] for row in rows(run))

        until(lambda: took_part(run, 0, after=0) and took_part(run, 1, after=0), "devices a and b took part")
        reason = "it failed: the message brings"
        until(lambda: any(row["dropped"].get("2", "").startswith(reason) for row in rows(run)), "c has refused")
        (rejected,) = json.loads((run / "fleet.json").read_text())["rejected"].values()
        assert rejected == "has no images: its data-path does not exist"
        until(missed, "a round ends without a, whose resident process hangs")
        signal_clients(signal.SIGKILL)
        before = last()
        until(lambda: took_part(run, 0, after=before), "a takes part again after its resident process was killed")
        until(lambda: bool(running.working("a")), "a has another resident process")
        running.kill("a")
        before = last()
        until(lambda: last() > before + 1, "rounds end without the SuperNode of a")
        assert not took_part(run, 0, after=before + 1)

        def restarted():  # as systemd does it, every time that the SuperLink refuses it
            if running.nodes["a"].poll() is not None:
                running.start_node("a", **start["a"])
            return took_part(run, 0, after=before + 1)

        until(restarted, "a takes part again after its SuperNode was killed")
        fedssl.send_signal(signal.SIGINT)
        output = fedssl.communicate()[0]
        assert fedssl.returncode == 130, output
        assert f"fedssl: stopped; continue with: fedssl {shlex.join(running.engine)} resume={run}" in output
        listed = running.flwr("list", "fleet", "--format", "json")
        assert json.loads(listed[listed.index("{") :])["runs"][0]["status"] == "finished:stopped"
        until((run / "summary.json").exists, "the ServerApp has ended")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "stopped by the SuperLink")


@pytest.mark.heavy
def test_a_run_resumes_after_its_superlink_was_killed(image_folders, tmp_path):
    run, simulation = tmp_path / "run", tmp_path / "simulation"
    overrides = [*SEEDED, "strategy=fedu", "method=byol", "rounds=5"]
    own = [f"dataset.path={tmp_path / 'images'}", "dataset.folders=owner", "partition=natural", "num_clients=3"]
    simulate([*overrides, *own, f"output_dir={simulation}"])
    numbers = partitions(simulation)
    with fleet(*image_folders) as running:
        for name, folder in image_folders.items():
            state = tmp_path / name
            running.start_node(name, data_path=folder, client_name=name, state_path=state, partition_id=numbers[name])
        running.wait_for_nodes(3)
        fedssl = running.submit(*overrides, "num_clients=3", f"output_dir={run}")
        until(lambda: len(rows(run)) >= 1, "a round has ended", fedssl)
        running.kill("superlink")
        running.start_superlink()
        output = fedssl.communicate()[0]
        assert fedssl.returncode == 1, output
        assert f"; continue with fedssl {' '.join(running.engine)} resume={run}\n" in output
        running.wait_for_nodes(3)
        before = len(rows(run))
        assert before < 5
        fedssl = running.submit(f"resume={run}")
        until(lambda: len(rows(run)) > before, "a round has ended", fedssl)
        (server,) = running.working("superlink")
        os.kill(server, signal.SIGKILL)
        output = fedssl.communicate()[0]
        assert fedssl.returncode == 1, output
        assert len(rows(run)) < 5
        status, output = running.run(f"resume={run}")
        assert status == 0, output
    assert model_bits(simulation) == model_bits(run)
    assert [row["round"] for row in rows(run)] == [1, 2, 3, 4, 5]
