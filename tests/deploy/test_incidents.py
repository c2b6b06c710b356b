"""Incidents of docs/deployment.md on a real fleet: what happens, and that the remedy works."""

import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest

from fedssl.errors import InputError
from fedssl.fleet.checks import run_checks
from fedssl.fleet.kit import Kit
from fedssl.wire.device import installed_versions
from tests.deploy.test_fleet import SMALL, rows, took_part
from tests.devices import write_images
from tests.fleet import DEPLOY, fleet, slow_device, until

pytestmark = pytest.mark.heavy

HOUR = 3600
# Python reads this file at its start: a clock that is an hour ahead.
WRONG_CLOCK = f"""
import datetime, time

real_time, real_datetime = time.time, datetime.datetime
time.time = lambda: real_time() + {HOUR}

class Ahead(real_datetime):
    @classmethod
    def now(cls, tz=None):
        return real_datetime.now(tz) + datetime.timedelta(seconds={HOUR})

datetime.datetime = Ahead
"""


class EndlessRun:
    """A run in which device a trains until the end."""

    def __init__(self, running, folder):
        self.running, self.folder = running, folder / "run"
        images = write_images(folder / "a", 9)
        start = {"client_name": "a", "data_path": images, "state_path": folder / "states"}
        running.start_node("a", environment=slow_device(folder / "slow"), **start)
        running.wait_for_nodes(1)
        overrides = ["num_clients=1", "rounds=100000", "aggregation.min_updates=1", "aggregation.max_retries=50"]
        self.process = running.submit(*SMALL, *overrides, f"output_dir={self.folder}")
        until(lambda: self.rounds >= 1, "a round has ended", self.process)

    @property
    def rounds(self):
        return len(rows(self.folder))

    def client_id(self, name):
        """Return the id of a device in the run; None before it has joined."""
        return json.loads((self.folder / "devices.json").read_text()).get(name)

    def used(self, name, *, after=0):
        """Return whether an update of a device was used after a round."""
        return took_part(self.folder, self.client_id(name), after=after)

    def reasons(self, name):
        """Return the reasons for which a device was dropped."""
        number = str(self.client_id(name))
        return [row["dropped"][number] for row in rows(self.folder) if number in row["dropped"]]


@contextmanager
def endless_run(*others):
    """A fleet of device a, which trains, and of others, which are registered and not started."""
    with fleet("a", *others) as running:
        yield EndlessRun(running, running.sandbox.path)


def finish(run):
    """The run was not affected."""
    assert run.process.poll() is None, run.process.communicate()[0]
    run.process.send_signal(signal.SIGINT)
    output = run.process.communicate()[0]
    assert run.process.returncode == 130, output


def device_checks(running, folder):
    """Return the checks of fedssl-device by name."""
    certificate = (running.keys / "ca.crt").read_bytes()
    kit = Kit(name="x", server=f"127.0.0.1:{running.port}", versions=installed_versions(), certificate=certificate)
    return {check.name: check for check in run_checks(kit, folder, folder)}


def create_keys(running, *nodes):
    command = [sys.executable, DEPLOY / "keys.py", running.keys, "--server", "127.0.0.1"]
    subprocess.run([*command, *(["--nodes", *nodes] if nodes else [])], check=True)


def test_lost_devices_wrong_clocks_and_rotated_keys(tmp_path, monkeypatch):
    with endless_run("b", "c") as run:
        running = run.running
        running.start_node("b", client_name="b", data_path=write_images(tmp_path / "b", 10, seed=1))
        until(lambda: run.used("b"), "b takes part")
        running.operator("remove", "b")
        removed_in = run.rounds + 1
        until(lambda: run.rounds > removed_in + 3, "rounds go on without b")
        assert not run.used("b", after=removed_in)
        until(lambda: running.nodes["b"].poll() is not None, "the SuperNode of b has ended")
        assert [device["name"] for device in json.loads(running.operator("list", "--json"))] == ["a", "c"]

        images = write_images(tmp_path / "c", 11, seed=2)
        (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK)
        start = {"client_name": "c", "data_path": images}
        running.start_node("c", environment={"PYTHONPATH": str(tmp_path)}, **start)
        until(lambda: running.nodes["c"].poll() is not None, "the SuperNode of c has ended")
        before = run.rounds
        until(lambda: run.rounds > before + 1, "rounds go on without c")
        assert run.client_id("c") is None
        assert device_checks(running, images)["clock"].passed
        with monkeypatch.context() as patch:
            real = time.time
            patch.setattr("time.time", lambda: real() + HOUR)
            clock = device_checks(running, images)["clock"]
        assert not clock.passed
        assert re.fullmatch(r"360\d s ahead of the server's", clock.result)
        running.start_node("c", **start)
        until(lambda: run.used("c"), "c takes part with the right clock")

        number = run.client_id("c")
        create_keys(running, "new")
        running.operator("rotate", "c", str(running.keys / "nodes" / "new.pub"))
        until(lambda: running.nodes["c"].poll() is not None, "the old key is rejected")
        before = run.rounds
        running.start_node("c", key="new", **start)
        until(lambda: run.used("c", after=before + 1), "c takes part with the new key")
        assert run.client_id("c") == number
        finish(run)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount")
def test_a_device_with_a_full_disk_is_dropped_meanwhile(tmp_path, small_disk):
    with endless_run("b") as run:
        with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        images = write_images(tmp_path / "b", 10, seed=1)
        run.running.start_node("b", client_name="b", data_path=images, state_path=small_disk)
        until(lambda: run.client_id("b") is not None and run.reasons("b"), "b is dropped")
        assert run.reasons("b")[0] == "it failed: OSError (No space left on device); see the log of the device"
        before = run.rounds
        until(lambda: run.rounds > before + 1, "rounds go on without b")
        (small_disk / "other").unlink()
        until(lambda: run.used("b"), "b takes part")
        finish(run)


def test_an_expired_certificate_is_renewed_without_the_devices(tmp_path):
    with fleet("a") as running:
        images = write_images(tmp_path / "a", 9)
        running.start_node("a", port=running.port, client_name="a", data_path=images)
        running.wait_for_nodes(1)
        running.kill("superlink")
        certificate = running.keys / "server.crt"
        certificate.unlink()
        keys = runpy.run_path(str(DEPLOY / "keys.py"))
        keys["create_all"].__globals__["SERVER_DAYS"] = -0.5
        keys["create_all"](running.keys, server=["127.0.0.1"], nodes=[])
        running.start_superlink()
        connection = device_checks(running, images)["connection"]
        assert not connection.passed
        assert "certificate has expired" in connection.result
        with pytest.raises(InputError, match=r"is not valid \(certificate has expired; the clock .*\); renew it with"):
            running.online()
        assert running.nodes["a"].poll() is None

        certificate.rename(certificate.with_suffix(".old"))
        create_keys(running)
        running.kill("superlink")
        running.start_superlink()
        assert device_checks(running, images)["connection"].passed
        running.wait_for_nodes(1)
        print(running.log("a"))
