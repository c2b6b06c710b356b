"""A Ray session for one run: private on this machine, or on a cluster.

A private session leaves no processes and no files. The hosts of a cluster must run the same code and share the run
folder, which contains client state.
"""

import logging
import os
import platform
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from fedssl.errors import InputError, RunError
from fedssl.machine.process import OPENMP_ENV, OPENMP_THREADS, available_cores
from fedssl.wire.device import code_fingerprint
from server_app.console import log_while_waiting
from simulation.resources import Host
from simulation.sandbox import ProcessSandbox, process_sandbox

CONNECT_TIMEOUT = 20.0  # seconds
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a client without a GPU share sees no GPU
    "RAY_worker_niceness": "0",  # with Ray's 15, a client gets 3% of a core next to a busy process
    "RAY_health_check_failure_threshold": "100",  # by default 5: a busy machine delays answers, and Ray drops the host
    "RAY_free_objects_period_milliseconds": "20",  # by default 1 s, in which dozens of models arrive
    **OPENMP_ENV,
    **OPENMP_THREADS,
}


class RayNotStartedError(RunError):
    """A private Ray did not start: it waits half a minute for its processes, which a busy machine delays."""


@contextmanager
def ray_session(
    *, gpus: int | None, address: str | None = None, setting: str = "engine.address", log_to_driver: bool = True
) -> Iterator[list[Host]]:
    """Yield the hosts of Ray.

    ``gpus`` is the number of GPUs of this machine for clients; None: all, which a cluster requires. ``address`` is that
    of a cluster, or "auto" for the cluster of this machine; None starts a private Ray on this machine, which ends with
    the block or with this process. ``setting`` is the name of the setting with the address, for errors. With
    ``log_to_driver`` the output of Ray's processes is printed.
    """
    if os.name != "posix":  # Ray's processes could not be found again
        raise InputError("engine=ray needs Linux or macOS; use engine=local")
    import ray

    from simulation.ray_internals import keep_sigterm_handler

    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")  # about GPUs, in every run
    alternative = "engine=local" if setting == "engine.address" else "sweep.jobs=1"
    with process_sandbox() as sandbox:
        # Ray's processes inherit both and import from the working directory first. An empty one prevents imports of
        # unrelated code in the user's directory. They use the import path of this process.
        path = os.pathsep.join(dict.fromkeys(str(Path(entry).absolute()) for entry in sys.path))
        environment = {**ENVIRONMENT, "FLWR_HOME": str(sandbox.home), "PYTHONPATH": path}
        with chdir(sandbox.work), patch.dict(os.environ, environment), keep_sigterm_handler():
            if address is None:
                _start(ray, sandbox, gpus=gpus, log_to_driver=log_to_driver, alternative=alternative)
            else:
                _join(ray, address, setting=setting, log_to_driver=log_to_driver)
        try:
            yield [_host(node) for node in ray.nodes() if node["Alive"]]
        finally:
            ray.shutdown()


def _host(node: Mapping[str, Any]) -> Host:
    resources = node["Resources"]
    return Host(cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)), node_id=node["NodeID"])


def _start(
    ray: ModuleType, sandbox: ProcessSandbox, *, gpus: int | None, log_to_driver: bool, alternative: str
) -> None:
    from simulation.ray_internals import without_services

    os.environ.pop("RAY_ADDRESS", None)  # do not use a cluster that is already running
    try:
        with without_services():
            ray.init(
                num_cpus=available_cores(),
                num_gpus=gpus,
                include_dashboard=False,
                logging_level=logging.WARNING,
                log_to_driver=log_to_driver,
                _temp_dir=str(sandbox.path / "ray"),
            )
    except Exception as error:  # Ray has no common class for these errors
        if "AF_UNIX" in str(error):  # it validates the path of its sockets
            raise InputError(
                f"the folder {sandbox.path.parent} is too long for the sockets of Ray; set RAY_TMPDIR to a shorter "
                f"one, e.g. RAY_TMPDIR=/tmp, or use {alternative}"
            ) from error
        raise RayNotStartedError(f"Ray could not be started: {error}; use {alternative}") from error


def _join(ray: ModuleType, address: str, *, setting: str, log_to_driver: bool) -> None:
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdigit()):
        raise InputError(f"{setting}={address} is not the address of a Ray cluster; set it to HOST:PORT or auto")
    try:
        if address != "auto":  # Ray would retry for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
        ray.init(
            address=address,
            runtime_env={"env_vars": ENVIRONMENT},
            logging_level=logging.WARNING,
            log_to_driver=log_to_driver,
        )
    except Exception as error:  # as above
        raise InputError(
            f"there is no Ray cluster of this machine at {setting}={address} ({error}); start one with "
            f"`ray start --head`, or remove {setting}"
        ) from error


HostInfo = dict[str, str]  # what all hosts of a run must share, and its value on a host


def host_info(probe_file: Path) -> tuple[HostInfo, bool]:
    """Return what must be equal on this host, and whether it has ``probe_file``, which is in the run's file system."""
    versions = {f"version of {package}": version(package) for package in ("torch", "flwr")}
    own = {"code of fedssl": code_fingerprint(), "version of python": platform.python_version()}
    return {**own, **versions}, probe_file.exists()


def check_hosts(folder: Path) -> None:
    """Raise `InputError` if a host of the cluster has other code or versions, or cannot access the run folder.

    A client may train on another host in each round, and its state is in ``folder``, which need not exist yet.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    folder.parent.mkdir(parents=True, exist_ok=True)
    probe_file = folder.with_name(f".{folder.name}-{uuid4().hex}")
    probe_file.touch()
    try:
        expected, _ = host_info(probe_file)
        remote_info = ray.remote(num_cpus=0, max_retries=0)(host_info)
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        replies = {
            host: remote_info.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                probe_file
            )
            for node, host in hosts.items()
        }
        with log_while_waiting("hosts of the cluster do not answer yet"):
            for host, reply in replies.items():
                try:
                    info, has_folder = ray.get(reply)
                except RayError as error:
                    raise InputError(
                        f"host {host} cannot run fedssl ({last_line(error)}); install the same environment on all hosts"
                    ) from error
                check_host(host, info, expected, folder=folder, has_folder=has_folder)
    finally:
        probe_file.unlink()


def last_line(error: Exception) -> str:
    """Return the last line of Ray's message, which has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def check_host(host: str, info: HostInfo, expected: HostInfo, *, folder: Path, has_folder: bool) -> None:
    """Raise `InputError` if a host differs from this one, or cannot access the run folder."""
    for name, ours in expected.items():
        if info[name] != ours:
            raise InputError(
                f"host {host} has another {name} ({info[name]}) than this one ({ours}); install the same on all hosts"
            )
    if not has_folder:
        raise InputError(
            f"host {host} cannot access {folder.parent}, the parent of the run folder, which has client state; set "
            "output_dir to a folder that all hosts share"
        )
