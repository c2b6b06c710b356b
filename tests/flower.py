"""Plain ``flwr run`` on a SuperLink of its own, which leaves neither processes nor files."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from flwr.proto.control_pb2 import ListRunsRequest

from fedssl.config.settings import EngineSettings
from fedssl.fleet.control import control_api
from simulation.sandbox import ProcessSandbox, process_sandbox
from tests.runs import read_summary

CONNECTION = '[superlink]\ndefault = "private"\n\n[superlink.private]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Without it every run installs the app's dependencies anew: perhaps another torch than the one in use.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; the default is 1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class RoundOutcome:
    """How a run ended.

    Attributes
    ----------
    status : str
        As Flower names it, e.g. "finished:completed".
    log : str
        All that the command said.
    """

    status: str
    log: str


def copy_app(target: Path) -> Path:
    """Copy the repository without its environment, of whose 80,000 files Flower would resolve every path."""
    ignored = shutil.ignore_patterns(".git", ".venv", "*cache*", "build", "data", "multirun", "runs")
    # Packages have a folder `data` or `runs` of their own.
    shutil.copytree(ROOT, target, ignore=lambda folder, names: ignored(folder, names) if Path(folder) == ROOT else ())
    return target


def flwr_run(app_dir: Path, *options: str, devices: Sequence[str] = ()) -> RoundOutcome:
    """``flwr run APP_DIR OPTIONS --stream``, to the end of the run.

    ``flwr run`` itself exits with 0 when the run failed, so the SuperLink is asked how it ended. ``devices`` are the
    configurations of the SuperNodes of a deployment; without any it is a simulation.
    """
    with process_sandbox() as sandbox:
        bin_folder = str(Path(sys.executable).parent)
        environment = {**os.environ, **ENVIRONMENT, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
        environment |= {"RAY_TMPDIR": str(sandbox.path), "no_proxy": "127.0.0.1,localhost"}
        port = _start_superlink(sandbox, environment, [] if devices else ["--simulation"])
        for device in devices:
            with (sandbox.path / f"supernode-{free_port()}.log").open("w") as log_file:
                command = [f"{bin_folder}/flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
                command += ["--port", str(free_port()), "--node-config", device]
                sandbox.start(command, environment=environment, stdout=log_file)
        run = sandbox.start(
            [f"{bin_folder}/flwr", "run", str(app_dir.resolve()), "private", "--stream", *options],
            environment=environment,
            stdout=subprocess.PIPE,
        )
        log = run.communicate()[0]
        with control_api(EngineSettings(name="deployment", address=f"127.0.0.1:{port}")) as control:
            runs = list(control.ListRuns(ListRunsRequest()).run_dict.values())
        return RoundOutcome(":".join([runs[0].status.status, runs[0].status.sub_status]) if runs else "refused", log)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of consecutive ports that nobody listens on and the system gives to no other program."""
    for first in range(20000 + os.getpid() % 5000, 32000, count):
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError(f"there are no {count} free ports in a row")


def _start_superlink(sandbox: ProcessSandbox, environment: Mapping[str, str], options: Sequence[str]) -> int:
    """Start a SuperLink, write the connection to it, wait until it listens; returns its port."""
    port = free_port()
    (sandbox.home / "config.toml").write_text(CONNECTION.format(port=port))
    program = str(Path(sys.executable).with_name("flower-superlink"))
    command = [program, "--insecure", *options, "--host", "127.0.0.1", "--port", str(port)]
    with (sandbox.path / "superlink.log").open("w") as log:
        superlink = sandbox.start(command, environment=environment, stdout=log)
    while superlink.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return port
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise RuntimeError((sandbox.path / "superlink.log").read_text())


def check_run_of_two_nodes(run: Path, log: str) -> None:
    """Assert that a run had the choices of its run config, and as many clients as the federation has nodes."""
    assert "num_clients=2, as many as the federation has nodes" in log
    summary = read_summary(run)
    assert (summary["status"], summary["rounds"]) == ("finished", 1)
    overrides = (run / "overrides.yaml").read_text().splitlines()
    assert {"- rounds=1", "- strategy='fedavg'", "- partition.alpha=0.5"} <= set(overrides)
    clients = (run / "clients.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["client"] for line in clients) == [0, 1]
