"""Real fleets on this machine with TLS, node keys, a proxy and local images, and their failures."""

import json
import os
import signal
import ssl
import urllib.error
import urllib.request
from contextlib import suppress

import numpy as np
import pytest

from fedssl.errors import InputError
from server_app.checkpoint import latest_checkpoint
from simulation.cli import run as simulate
from tests.devices import write_images
from tests.fleet import PATIENCE, fleet, until

FORM = ["dataset=image_folder", "dataset.size=8", "dataset.channels=1", "dataset.mean=[0.4]", "dataset.std=[0.3]"]
SMALL = [*FORM, "local_epochs=1", "encoder.width=4", "threads=1", "batch_size=8", "device=cpu", "evaluation=none"]
SMALL += ["final_evaluation=none", "collapse_images=0", "measure_resources=false", "seed=3"]


def layers(folder):
    return latest_checkpoint(folder / "checkpoints").models["global"].layers


def equal(one, other):
    assert list(one) == list(other)
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def places(tmp_path):
    """Folders with different numbers of images for three owners."""
    return {
        name: write_images(tmp_path / "images" / name, 9 + place, seed=place)
        for place, name in enumerate(("a", "b", "c"))
    }


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


@pytest.mark.heavy
def test_a_fleet_and_the_simulation_are_bit_identical(places, tmp_path):
    words = [*SMALL, "strategy=fedu", "method=byol", "rounds=2"]
    own = [f"dataset.path={tmp_path / 'images'}", "dataset.folders=owner", "partition=natural", "num_clients=3"]
    simulate([*words, *own, f"output_dir={tmp_path / 'simulation'}"])
    numbers = partitions(tmp_path / "simulation")
    with fleet(*places) as one:
        for name, place in places.items():
            one.start_node(
                name, data_path=place, client_name=name, state_path=tmp_path / name, partition_id=numbers[name]
            )
        one.start_node("stranger", data_path=places["a"])
        one.wait_for_nodes(3)
        status, output = one.run(*words, "num_clients=3", f"output_dir={tmp_path / 'fleet'}")
        assert status == 0, output
        assert f"the run folder is {tmp_path / 'fleet'}\n" in output
        refused(one)  # no client trained on its images
        check_the_public_port(one)
    assert equal(layers(tmp_path / "simulation"), layers(tmp_path / "fleet"))
    assert json.loads((tmp_path / "fleet" / "devices.json").read_text()) == numbers


@pytest.mark.slow
def test_devices_reach_only_the_fleet_api(tmp_path):
    with fleet("a") as one:
        check_the_public_port(one)
        one.start_node("stranger", data_path=tmp_path)
        words = [*one.engine, *SMALL, "resume=/not/here"]
        with pytest.raises(InputError, match="resume=/not/here is not a run folder: config.yaml"):
            simulate(words)  # the ServerApp output so
        words[1] = f"engine.address=127.0.0.1:{one.public}"
        with pytest.raises(
            InputError, match=r"rejects the run \(status 403\); set engine.address to the port of the Control API"
        ):
            simulate(words)
        refused(one)


def check_the_public_port(one):
    """Only the operator's port can register keys and submit runs."""
    for path in ("start-run", "register-node", "stop-run", "list-runs"):
        for public in (f"/v1/control/{path}", f"/v1/fleet/../control/{path}", f"/v1/fleet/%2e%2e/control/{path}"):
            assert post(one.public, public, one.keys) == 403
        assert post(one.port, f"/v1/control/{path}", one.keys) != 403
    assert post(one.public, "/v1/runtime/acquire-task", one.keys) == 403
    assert post(one.public, "/v1/fleet/pull-messages", one.keys) != 403


def refused(one):
    """An unregistered node is rejected and ends."""
    assert one.nodes["stranger"].wait(timeout=PATIENCE) == 1
    assert "Failed to activate SuperNode" in one.log("stranger")


# --- devices that fail ---


def rows(run, name="metrics.jsonl"):
    """Return the lines of a file of the run folder."""
    text = (run / name).read_text() if (run / name).exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def took_part(run, client, *, after):
    """Return whether an update of the client was used in a later round."""
    return any(row["client"] == client and row["round"] > after for row in rows(run, "clients.jsonl"))


@pytest.mark.heavy
def test_a_run_survives_failures_of_its_devices(places, tmp_path):
    run = tmp_path / "run"
    words = [*SMALL, "num_clients=3", "rounds=1000", f"output_dir={run}", "aggregation.min_updates=1"]
    words += ["aggregation.round_deadline=60", "aggregation.max_retries=50"]
    places["c"] = tmp_path / "nowhere"  # its ClientApp raises
    with fleet(*places) as one:
        start = {name: {"data_path": place, "client_name": name} for name, place in places.items()}
        for name in places:
            one.start_node(name, **start[name])
        one.wait_for_nodes(3)
        fedssl = one.submit(*words)

        def last():
            assert fedssl.poll() is None, fedssl.communicate()[0]
            return len(rows(run))

        def signal_clients(number):
            for pid in one.working("flwr-clientapp", "a"):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        def missed():  # one that is stopped after its reply is not missed, but so is the next one
            signal_clients(signal.SIGSTOP)
            return any("0" in row["dropped"] for row in rows(run))

        until(lambda: took_part(run, 0, after=0) and took_part(run, 1, after=0), "devices a and b took part")
        told = "it failed with InputError; the log of the device says more"
        until(lambda: any(row["dropped"].get("2") == told for row in rows(run)), "c has raised")
        until(missed, "a round ends without a, whose ClientApp hangs")
        signal_clients(signal.SIGKILL)
        before = last()
        until(lambda: took_part(run, 0, after=before), "a takes part again after its ClientApp was killed")
        until(lambda: bool(one.working("flwr-clientapp", "a")), "a is in a round")
        one.kill("a")
        before = last()
        until(lambda: last() > before + 1, "rounds end without the SuperNode of a")
        assert not took_part(run, 0, after=before + 1)

        def restarted():  # as systemd does it, every time that the SuperLink refuses it
            if one.nodes["a"].poll() is not None:
                one.start_node("a", **start["a"])
            return took_part(run, 0, after=before + 1)

        until(restarted, "a takes part again after its SuperNode was killed")
        fedssl.send_signal(signal.SIGINT)
        output = fedssl.communicate()[0]
        assert fedssl.returncode == 130, output
        listed = one.flwr("list", "fleet", "--format", "json")
        assert json.loads(listed[listed.index("{") :])["runs"][0]["status"] == "finished:stopped"


# --- servers that fail ---


@pytest.mark.heavy
def test_a_run_is_resumed_after_its_superlink_and_serverapp_were_killed(places, tmp_path):
    run, simulation = tmp_path / "run", tmp_path / "simulation"
    words = [*SMALL, "strategy=fedu", "method=byol", "rounds=5"]
    own = [f"dataset.path={tmp_path / 'images'}", "dataset.folders=owner", "partition=natural", "num_clients=3"]
    simulate([*words, *own, f"output_dir={simulation}"])
    numbers = partitions(simulation)
    with fleet(*places) as one:
        for name, place in places.items():
            state = tmp_path / name
            one.start_node(name, data_path=place, client_name=name, state_path=state, partition_id=numbers[name])
        one.wait_for_nodes(3)
        fedssl = one.submit(*words, "num_clients=3", f"output_dir={run}")
        until(lambda: len(rows(run)) >= 1, "a round has ended", fedssl)
        one.kill("superlink")
        one.start_superlink()
        output = fedssl.communicate()[0]
        assert fedssl.returncode == 1, output
        assert f"; continue with fedssl {' '.join(one.engine)} resume={run}\n" in output
        one.wait_for_nodes(3)
        before = len(rows(run))
        assert before < 5
        fedssl = one.submit(f"resume={run}")
        until(lambda: len(rows(run)) > before, "a round has ended", fedssl)
        (server,) = one.working("flwr-serverapp", "superlink")
        os.kill(server, signal.SIGKILL)
        output = fedssl.communicate()[0]
        assert fedssl.returncode == 1, output
        assert len(rows(run)) < 5
        status, output = one.run(f"resume={run}")
        assert status == 0, output
    assert equal(layers(simulation), layers(run))
    assert [row["round"] for row in rows(run)] == [1, 2, 3, 4, 5]
