"""Ray for one run: a private session on this machine, which leaves neither processes nor files, or a cluster.

The hosts of a cluster must run the same code and see the run folder, in which clients keep their state.
"""

import logging
import os
import platform
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from uuid import uuid4

from fedssl.errors import InputError, RunError
from fedssl.fingerprint import code_fingerprint
from fedssl.machine.threads import OPENMP_ENV, available_cores
from fedssl.waiting import log_while_waiting
from simulation.resources import Host
from simulation.sandbox import ProcessSandbox, process_sandbox

if TYPE_CHECKING:
    import ray

CONNECT_TIMEOUT = 20.0  # seconds
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a client without a share of a GPU sees none
    "RAY_worker_niceness": "0",  # Ray's 15 leaves a client 3% of a core beside one process that never rests
    "RAY_free_objects_period_milliseconds": "20",  # Ray waits for a second, in which dozens of models arrive
    **OPENMP_ENV,
}
COMPARED_VERSIONS = ("python", "torch", "flwr")  # that must be the same


@contextmanager
def ray_session(*, gpus: int | None, address: str | None = None) -> Iterator[list[Host]]:
    """Ray and its hosts, for the time of the block.

    Parameters
    ----------
    gpus : int or None
        How many GPUs of this machine clients may have; None, which a cluster needs: all there are.
    address : str or None
        Of the cluster to join, "auto" for the one that this machine belongs to. None: a private Ray on this machine,
        which ends with the block or with this process and leaves nothing behind.

    Raises
    ------
    InputError
        There is no cluster at the address; or on Windows, where processes cannot be found again.
    RunError
        Ray does not start.
    """
    if os.name != "posix":
        raise InputError("engine=ray needs Linux or macOS; use engine=local")
    import ray

    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")  # a tip about GPUs in every run
    with process_sandbox() as sandbox:
        with _environment(sandbox.work, {**ENVIRONMENT, "FLWR_HOME": str(sandbox.home)}):
            if address is None:
                _start(ray, sandbox, gpus=gpus)
            else:
                _join(ray, address)
        try:
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            yield [Host(cpus=int(there.get("CPU", 0)), gpus=int(there.get("GPU", 0))) for there in alive]
        finally:
            ray.shutdown()


def _start(ray: ModuleType, sandbox: ProcessSandbox, *, gpus: int | None) -> None:
    os.environ.pop("RAY_ADDRESS", None)  # a Ray cluster that happens to run is not ours to use
    try:
        ray.init(
            num_cpus=available_cores(),
            num_gpus=gpus,
            include_dashboard=False,
            logging_level=logging.WARNING,
            _temp_dir=str(sandbox.path / "ray"),
        )
    except Exception as error:  # Ray has no class of its own for what may go wrong here
        raise RunError(f"Ray could not be started: {error}; engine=local does without it") from error


def _join(ray: ModuleType, address: str) -> None:
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdigit()):
        raise InputError(f"engine.address={address} is no address of a Ray cluster; set it to HOST:PORT or to auto")
    try:
        if address != "auto":  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
        ray.init(address=address, runtime_env={"env_vars": ENVIRONMENT}, logging_level=logging.WARNING)
    except Exception as error:  # as above
        raise InputError(
            f"engine.address={address} leads to no Ray cluster that this machine belongs to ({error}); start one with "
            "`ray start --head`, or leave engine.address out"
        ) from error


@contextmanager
def _environment(directory: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A working directory and environment for what is started in the block.

    Ray's processes inherit both, and import from the working directory before anything else: an empty one keeps them
    from code that happens to lie where the run was started. They find what this process finds.
    """
    before, folder = dict(os.environ), Path.cwd()
    terminate = signal.getsignal(signal.SIGTERM)
    path = os.pathsep.join(dict.fromkeys(str(Path(entry).absolute()) for entry in sys.path))
    os.environ.update({**environment, "PYTHONPATH": path})
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray sets its own


@dataclass(frozen=True)
class HostInfo:
    """What must be the same on all hosts of a run.

    Attributes
    ----------
    code : str
        Fingerprint of fedssl's source files.
    python, torch, flwr : str
        Versions.
    folder : bool
        Whether the run folder can be seen.
    """

    code: str
    python: str
    torch: str
    flwr: str
    folder: bool


def host_info(probe_file: Path) -> HostInfo:
    """Those of the host on which this is called; ``probe_file`` is a file that only the run's file system has."""
    versions = {package: version(package) for package in ("torch", "flwr")}
    return HostInfo(code=code_fingerprint(), python=platform.python_version(), folder=probe_file.exists(), **versions)


def check_hosts(folder: Path) -> None:
    """Ask every host of the cluster that this process has joined.

    A client may train on another host in each round. What it keeps from round to round, such as a target network or
    frozen layers, lies in the run folder, so all hosts must see the same one.

    Parameters
    ----------
    folder : Path
        Of the run; need not exist yet.

    Raises
    ------
    InputError
        A host runs other code or other versions, or does not see the folder; it is named.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    folder.parent.mkdir(parents=True, exist_ok=True)
    probe_file = folder.with_name(f".{folder.name}-{uuid4().hex}")
    probe_file.touch()
    try:
        expected = host_info(probe_file)
        ask = ray.remote(num_cpus=0, max_retries=0)(host_info)
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        replies = {
            host: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(probe_file)
            for node, host in hosts.items()
        }
        with log_while_waiting("hosts of the cluster do not answer yet"):
            for host, reply in replies.items():
                check_host(host, _get_reply(host, reply), expected, folder)
    finally:
        probe_file.unlink()


def _get_reply(host: str, reply: "ray.ObjectRef[HostInfo]") -> HostInfo:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(reply)
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise InputError(
            f"host {host} cannot run fedssl ({reason}); install the same environment on all hosts"
        ) from error


def check_host(host: str, info: HostInfo, expected: HostInfo, folder: Path) -> None:
    """Refuse a host that differs from this one in what a run needs to be the same; raises `InputError`."""
    theirs, ours = asdict(info), asdict(expected)
    for name, what in (("code", "code of fedssl"), *((name, f"version of {name}") for name in COMPARED_VERSIONS)):
        if theirs[name] != ours[name]:
            raise InputError(
                f"host {host} has another {what} ({theirs[name]}) than this one ({ours[name]}); install the same on "
                "all hosts"
            )
    if not info.folder:
        raise InputError(
            f"host {host} does not see {folder.parent}, where the run folder is to be: what clients keep from round to "
            "round lies there; set output_dir to a folder that all hosts share"
        )
