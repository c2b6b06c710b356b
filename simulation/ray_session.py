"""Ray for one run: a private session on this machine, which leaves neither processes nor files, or a cluster."""

import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fedssl.errors import InputError, RunError
from fedssl.machine.threads import WAITING, available_cores
from simulation.sandbox import ProcessSandbox, process_sandbox
from simulation.share import Host

CONNECT_TIMEOUT = 20.0  # seconds
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a client without a share of a GPU sees none
    "RAY_worker_niceness": "0",  # Ray's 15 leaves a client 3% of a core beside one process that never rests
    "RAY_free_objects_period_milliseconds": "20",  # Ray waits for a second, in which dozens of models arrive
    **WAITING,
}


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
