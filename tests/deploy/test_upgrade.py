"""A rolling upgrade with two installed versions of this project: one device, then the server, then the other device.

The old version lacks a setting, and accepts an older safetensors than the current one. Only metadata of that package
are old in its environment, which uses the libraries of this one. Its installed ``client_app`` cannot be imported: a
device uses the one that the server sends.
"""

import json
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import flwr
import pytest

from fedssl.export import load_encoder
from fedssl.fleet import cli
from fedssl.fleet.encoders import stored_encoders
from fedssl.fleet.watch import Thresholds
from tests.deploy.test_fleet import SMALL, rows, took_part
from tests.devices import write_images
from tests.fleet import INSTALLATION, REPOSITORY, fleet, slow_device, until
from tests.flower import copy_app

OLD, SAFETENSORS = "0.0.9", "0.4.5"
PROGRAMS = ("flower-supernode", "flower-superexec", "flwr-clientapp")


def write_old_version(folder: Path) -> Path:
    """Copy this project as an older version, and return the copy."""
    app = copy_app(folder)
    replaced = {
        "pyproject.toml": [
            (f'version = "{version("fedssl")}"', f'version = "{OLD}"'),
            ("safetensors>=0.5", "safetensors>=0.4"),
        ],
        "conf/method/byol.yaml": [("target_init: persist", "")],
    }
    for name, pairs in replaced.items():
        text = (app / name).read_text()
        for new, old in pairs:
            assert text.count(new) == 1, (name, new)
            text = text.replace(new, old)
        (app / name).write_text(text)
    return app


def install(app: Path, environment: Path) -> Path:
    """Install a version in its own environment, without its dependencies, and return the environment."""
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run(["uv", "pip", "install", "--quiet", "--no-deps", "--python", python, app], check=True)
    [packages] = (environment / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text(f"{Path(flwr.__file__).parents[1]}\n")
    metadata = packages / f"safetensors-{SAFETENSORS}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: safetensors\nVersion: {SAFETENSORS}\n")
    for name in PROGRAMS:
        _, rest = (INSTALLATION / "bin" / name).read_text().split("\n", 1)
        (environment / "bin" / name).write_text(f"#!{python}\n{rest}")
        (environment / "bin" / name).chmod(0o755)
    (packages / "client_app" / "__init__.py").write_text("raise ImportError('the installed version')\n")
    return environment


@pytest.fixture
def old(tmp_path):
    """The code and the environment of the old version."""
    app = write_old_version(tmp_path / "old")
    return app, install(app, tmp_path / "environment")


def device_command(environment: Path, *arguments: object) -> str:
    """Return the output of the installed ``fedssl-device``."""
    command = [environment / "bin" / "python", "-P", "-c", "from fedssl.command_line import fedssl_device as f; f()"]
    environment = {"PATH": "/usr/bin:/bin"}
    ran = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.heavy
def test_devices_are_upgraded_before_and_after_the_server(old, tmp_path):
    old_app, old_environment = old
    run, states = tmp_path / "run", {name: tmp_path / name / "states" for name in "ab"}
    overrides = [*SMALL, "strategy=fedu", "method=byol", "rounds=1000", "num_clients=2", f"output_dir={run}"]
    overrides += ["aggregation.min_updates=1", "aggregation.max_retries=50", "engine.deliver_every=1"]
    here = version("fedssl")
    with fleet() as running:
        superlink = {"address": f"127.0.0.1:{running.port}", "certificates": str(running.keys / "ca.crt")}

        def join(name):
            """Invite a device with the new version, and set it up with the old one."""
            kit = {"server": f"127.0.0.1:{running.public}", "with_key": True, "output": tmp_path / f"{name}.kit"}
            cli.invite(Namespace(**superlink, **kit, names=[name], certificate=None))
            images = write_images(tmp_path / "images" / name, 9)
            folders = (f"images={images}", f"folder={tmp_path / name}", f"states={states[name]}")
            assert f"fedssl {OLD}, flwr" in device_command(old_environment, "setup", kit["output"], *folders)
            shutil.copy(tmp_path / name / "node.key", running.keys / "nodes" / f"{name}.key")

        slow = slow_device(tmp_path / "slow")

        def start(name, environment):
            limits = tmp_path / name / "limits.yaml"
            paths = {"data_path": tmp_path / "images" / name, "state_path": states[name], "limits": limits}
            start = {"port": running.port, "installation": environment, "environment": slow if name == "a" else {}}
            running.start_node(name, **start, client_name=name, **paths)

        def listed():
            devices = json.loads(cli.list_devices(Namespace(**superlink, json=True, run=run)))
            return {device["name"]: device for device in devices}

        def stop(fedssl):
            fedssl.send_signal(signal.SIGINT)
            output = fedssl.communicate()[0]
            assert fedssl.returncode == 130, output
            until((run / "summary.json").exists, "the ServerApp has ended")
            return output

        (running.keys / "nodes").mkdir(exist_ok=True)
        for name, environment in (("a", INSTALLATION), ("b", old_environment)):
            join(name)
            start(name, environment)
        running.wait_for_nodes(2)

        running.app = old_app
        fedssl = running.submit(*overrides)
        until(lambda: len(rows(run)) >= 1, "a round has ended", fedssl)
        client = json.loads((run / "devices.json").read_text())
        assert [row["client"] for row in rows(run, "clients.jsonl")[:2]] == [0, 1]
        assert (listed()["a"]["fedssl"], listed()["b"]["fedssl"]) == (here, OLD)
        until(lambda: all(stored_encoders(states[name]) for name in "ab"), "old code has stored encoders")
        resident = running.working("a")
        assert f"device b has other versions than the server: fedssl {OLD} (here {here})" in stop(fedssl)
        [task] = states["a"].glob("*/.task.json")
        assert "target_init" not in task.read_text()

        running.app = REPOSITORY  # the server is upgraded
        before = len(rows(run))
        fedssl = running.submit(f"resume={run}", "engine.deliver_every=4")
        until(lambda: took_part(run, client["a"], after=before), "a takes part with the new code", fedssl)
        assert set(running.working("a")).isdisjoint(resident)
        assert not took_part(run, client["b"], after=before)
        reason = (
            f"failed: the device cannot run the server's code: fedssl {here} needs safetensors>=0.5 (installed: "
            f"{SAFETENSORS}); upgrade its environment, or the server if that is older"
        )
        assert (listed()["b"]["status"], listed()["b"]["last error"]) == ("rejected", reason)
        view = cli._view(Namespace(**superlink, run=run), Thresholds())
        assert view.alerts == [f"device b does not take part: it {reason}"]

        running.nodes["b"].terminate()
        running.nodes["b"].wait()
        until(lambda: listed()["b"]["status"] == "offline", "the SuperNode of b is offline")
        before = len(rows(run))
        until(lambda: len(rows(run)) > before + 1, "the run goes on without b", fedssl)
        start("b", INSTALLATION)
        until(lambda: took_part(run, client["b"], after=before), "b takes part with the new code", fedssl)
        assert listed()["b"]["fedssl"] == here
        assert listed()["b"]["status"] != "rejected"
        node = listed()["b"]["node"]
        assert f"node {node} b does not take part: it {reason}" in stop(fedssl)
        log = running.log("b")
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :]
    # States survived the upgrades: an update without its earlier state would be dropped.
    assert not [row for row in rows(run) if any("state" in reason for reason in row["dropped"].values())]
    copied = tmp_path / "encoder.pt"
    assert str(copied) in device_command(old_environment, "encoder", f"folder={tmp_path / 'a'}", f"output={copied}")
    assert load_encoder(copied).metadata["strategy"] == "FedU"
