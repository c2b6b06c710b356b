"""Ray for one run: a private session that leaves neither processes nor files, and what of the machine a client gets."""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedssl.errors import InputError, RunFailed
from fedssl.machine.threads import WAITING, available_cores
from simulation.processes import private_place

ACTORS_PER_GPU = 4  # more processes on one GPU wait for each other
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a client without a share of a GPU sees none
    "RAY_worker_niceness": "0",  # Ray's 15 leaves a client 3% of a core beside one process that never rests
    **WAITING,
}


@dataclass(frozen=True)
class Machine:
    """What clients can have of this machine.

    Attributes
    ----------
    cpus, gpus : int
    """

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Share:
    """What one client occupies.

    Attributes
    ----------
    cpus : int
    gpus : float
    """

    cpus: int
    gpus: float


def share(
    machine: Machine, *, client_cpus: int | None, client_gpus: float | None, threads: int, at_most: int
) -> tuple[Share, int]:
    """What a client occupies, and how many clients run at a time.

    Parameters
    ----------
    machine : Machine
        With 0 GPUs if clients are to train on CPUs.
    client_cpus : int or None
        None: one for each of its threads, and a single one beside a GPU.
    client_gpus : float or None
        None: such a share that every GPU has clients, the same number on each, and at most 4.
    threads : int
        Of a client.
    at_most : int
        How many clients are of use at a time.

    Raises
    ------
    InputError
        The machine has not what is asked for.
    """
    if client_gpus is not None and (client_gpus < 0 or (client_gpus > 1 and client_gpus != int(client_gpus))):
        raise InputError(f"engine.client_gpus={client_gpus} must be a share from 0 to 1 or a whole number of GPUs")
    if client_gpus is not None and client_gpus > machine.gpus:
        raise InputError(
            f"engine.client_gpus={client_gpus} but clients can have {machine.gpus} GPUs; set engine.client_gpus=0"
        )
    on_gpus = machine.gpus > 0 and client_gpus != 0
    cpus = client_cpus if client_cpus is not None else 1 if on_gpus else min(threads, machine.cpus)
    if cpus != int(cpus) or not 1 <= cpus <= machine.cpus:
        raise InputError(
            f"engine.client_cpus={cpus} must be a whole number from 1 to the {machine.cpus} CPUs there are"
        )
    clients = min(machine.cpus // cpus, at_most)
    if not on_gpus:
        return Share(cpus, 0.0), clients
    if client_gpus is None:
        per_gpu = min(max(1, clients // machine.gpus), ACTORS_PER_GPU)
        client_gpus = 1.0 if per_gpu == 1 else int(10_000 / per_gpu) / 10_000  # the digits that Ray counts
    on_one = int(1 / client_gpus + 1e-6) if client_gpus <= 1 else 0
    fit = machine.gpus * on_one if on_one else int(machine.gpus / client_gpus)
    return Share(cpus, client_gpus), min(clients, fit)


@contextmanager
def ray_session(*, gpus: int | None) -> Iterator[Machine]:
    """A private Ray on this machine, which ends with the block or with this process and leaves nothing behind.

    Parameters
    ----------
    gpus : int or None
        How many GPUs clients may have; None: all there are.

    Raises
    ------
    InputError
        On Windows, where processes cannot be found again.
    RunFailed
        Ray does not start.
    """
    if os.name != "posix":
        raise InputError("engine=ray needs Linux or macOS; use engine=local")
    import ray

    cpus = available_cores()
    with private_place() as place:
        with _surroundings(place.work, {**ENVIRONMENT, "FLWR_HOME": str(place.home)}):
            warnings.filterwarnings("ignore", category=FutureWarning, module="ray")  # a tip about GPUs in every run
            try:
                ray.init(
                    num_cpus=cpus,
                    num_gpus=gpus,
                    include_dashboard=False,
                    logging_level=logging.WARNING,
                    _temp_dir=str(place.path / "ray"),
                )
            except Exception as error:  # Ray has no class of its own for what may go wrong here
                raise RunFailed(f"Ray could not be started: {error}; engine=local does without it") from error
        try:
            yield Machine(cpus=cpus, gpus=int(ray.cluster_resources().get("GPU", 0)))
        finally:
            ray.shutdown()


@contextmanager
def _surroundings(directory: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A working directory and environment for what is started in the block.

    Ray's processes inherit both, and import from the working directory before anything else: an empty one keeps them
    from code that happens to lie where the run was started. They find what this process finds.
    """
    before, folder = dict(os.environ), Path.cwd()
    terminate = signal.getsignal(signal.SIGTERM)
    path = os.pathsep.join(dict.fromkeys(str(Path(entry).absolute()) for entry in sys.path))
    os.environ.update({**environment, "PYTHONPATH": path})
    os.environ.pop("RAY_ADDRESS", None)  # a Ray cluster that happens to run is not ours to use
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray sets its own
