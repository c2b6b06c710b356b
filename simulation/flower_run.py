"""Engine ``ray``: a managed ``flwr run`` (Flower's simulation runtime on Ray: several processes, several GPUs).

A private SuperLink runs in a neutral directory, so that ServerApp and ClientApp both come from the bundle that was
just built and never from somebody's working directory; it has its own state, port and Ray session. The log is shown
live, the outcome is checked (``flwr run`` itself exits with 0 when the run failed), and in the end everything that was
started is stopped and removed, see ``processes.py``.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fedssl.errors import InputError, RunFailed
from fedssl.machine.threads import WAITING, available_cores
from simulation.processes import Place, private_place

LOG_FILE = "flower.log"
START_TIMEOUT = 120.0  # seconds until the SuperLink listens: importing Flower from a cold disk takes long
CONNECTION = '[superlink]\ndefault = "private"\n\n[superlink.private]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
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
    **WAITING,
}
# Large buffers otherwise go back to the system when freed and cost one page fault per page when allocated again.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}

DECORATION = re.compile(r"\x1b\[\d*m|╭.*╮|╰.*╯|│")  # colours, and the box around an error of the command line
# What the command line says before the log of the run begins, i.e. while the run is pending.
PENDING = re.compile(
    r"Flower App configuration warnings|- Recommended property|Using SuperLink: |Successfully started run "
    r"|INFO +: +Starting logstream|\s*$"
)
# What Flower and Ray say in every run. All else is shown: a line too many is better than a lost warning.
NOISE = re.compile(
    PENDING.pattern + r"|(\(\w+ pid=\d+\) )?"  # Ray's prefix of what clients say
    r"((DEBUG|INFO) +: |WARNING : +(Since flwr 1\.32, default simulated|Manually terminating ClientAppActor))"
    r"|Successfully installed .* to "
)


def run(
    app_dir: Path,
    overrides: Sequence[str],
    *,
    num_clients: int,
    rounds: int,
    client_cpus: int,
    client_gpus: float,
    output_dir: Path,
    cpus: int | None = None,
    allocator: bool = True,
    verbose: bool = False,
    import_from: Path | None = None,
    pending_timeout: float = 300.0,
) -> None:
    """Run the Flower app in ``app_dir``; return when all rounds are done and the result exists.

    Parameters
    ----------
    app_dir : Path
        The folder with the ``pyproject.toml`` of the app, i.e. a clone of the repository.
    overrides : sequence of str
        The words of the command line, e.g. ``["strategy=l_dawa", "rounds=3"]``. Paths in them must be absolute, because
        the run has another working directory.
    num_clients, rounds : int
        Number of simulated SuperNodes; number of rounds that must have been run in the end.
    client_cpus : int
        CPUs that one client occupies, at least 1: ``cpus // client_cpus`` clients run at the same time.
    client_gpus : float
        GPUs that one client occupies, e.g. 0.25 for four clients on one GPU. With 0 clients see no GPU.
    output_dir : Path
        The run folder: the app must write ``summary.json`` into it; the whole log is appended to ``flower.log`` there.
    cpus : int or None
        CPUs for all clients together; None takes all that this process may use.
    allocator : bool
        Whether processes keep freed memory (glibc only): faster training for more resident memory.
    verbose : bool
        Whether to print every line of the log instead of leaving out what Flower says in every run.
    import_from : Path or None
        A folder from which server and clients can import besides; None: what is installed or on PYTHONPATH only.
    pending_timeout : float
        Seconds that a submitted run may take to begin.

    Raises
    ------
    InputError
        If this cannot run here; nothing was started.
    RunFailed
        If the run did not end well.
    """
    cpus = cpus or available_cores()
    check(app_dir, client_cpus=client_cpus, client_gpus=client_gpus, cpus=cpus)
    output_dir.mkdir(parents=True, exist_ok=True)
    summary_file = output_dir / "summary.json"
    old = summary_file.stat().st_mtime_ns if summary_file.exists() else 0
    with private_place() as place, (output_dir / LOG_FILE).open("a", buffering=1, encoding="utf-8") as log:
        print(f"starting Flower and Ray for {num_clients} clients on {cpus} CPUs", flush=True)
        environment = make_environment(
            os.environ, ray_directory=place.path, allocator=allocator, import_from=import_from
        )
        start_superlink(place, log, environment=environment)
        federation = (
            f"num-supernodes={num_clients} client-resources-num-cpus={client_cpus} "
            f"client-resources-num-gpus={float(client_gpus)} init-args-num-cpus={cpus}"
        )
        flwr_run = submit(place, app_dir, overrides, federation=federation, environment=environment)
        follow(flwr_run, log, verbose=verbose, pending_timeout=pending_timeout)
        command = [program("flwr"), "list", "private", "--format", "json"]
        listing = place.start(command, environment=environment, stdout=subprocess.PIPE).communicate()[0]
    summary = read_summary(summary_file, newer_than=old)
    if reason := failure(*run_status(listing), summary, rounds=rounds):
        print(f"the whole log is in {output_dir / LOG_FILE}", flush=True)
        raise RunFailed(reason)


def check(app_dir: Path, *, client_cpus: int, client_gpus: float, cpus: int) -> None:
    """Refuse with an `InputError` what would fail only after Flower and Ray have started, or wait for ever."""
    if os.name != "posix":
        raise InputError("engine=ray needs Linux or macOS; use engine=local")
    if not (app_dir / "pyproject.toml").is_file():
        raise InputError(f"engine=ray needs a clone of the repository, which {app_dir} is not; use engine=local")
    if client_cpus != int(client_cpus) or not 1 <= client_cpus <= cpus:
        raise InputError(f"engine.client_cpus={client_cpus} must be a whole number from 1 to the {cpus} CPUs there are")
    if client_gpus < 0 or (client_gpus > 1 and client_gpus != int(client_gpus)):
        raise InputError(f"engine.client_gpus={client_gpus} must be a share from 0 to 1 or a whole number of GPUs")
    if client_gpus > 0:
        import torch  # seconds that a run on CPUs need not wait in this process

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if client_gpus > gpus:
            raise InputError(f"engine.client_gpus={client_gpus} but there are {gpus} GPUs; set engine.client_gpus=0")


def program(name: str) -> str:
    """Path of a command that was installed beside this Python, whatever PATH says."""
    return str(Path(sys.executable).parent / name)


def make_environment(
    base: Mapping[str, str], *, ray_directory: Path, allocator: bool, import_from: Path | None = None
) -> dict[str, str]:
    """Return the environment of everything that is started, made from the one of this process.

    What is started has another working directory, so PYTHONPATH becomes absolute.
    """
    environment = {**base, **ENVIRONMENT, **(ALLOCATOR if allocator else {}), "RAY_TMPDIR": str(ray_directory)}
    environment.pop("RAY_ADDRESS", None)  # a Ray cluster that happens to run is not ours to use

    def put_first(name: str, value: str, separator: str) -> None:
        environment[name] = separator.join(filter(None, (value, base.get(name))))

    put_first("PATH", str(Path(sys.executable).parent), os.pathsep)  # Flower finds its own commands through PATH
    put_first("PYTHONWARNINGS", "ignore::FutureWarning:ray._private.worker", ",")  # a tip about GPUs in every run
    for name in ("no_proxy", "NO_PROXY"):
        put_first(name, "127.0.0.1,localhost", ",")
    paths = [Path(entry) for entry in base["PYTHONPATH"].split(os.pathsep)] if base.get("PYTHONPATH") else []
    paths += [import_from] if import_from else []
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(str(path.absolute()) for path in paths)
    return environment


def run_config(overrides: Sequence[str]) -> str:
    """Write the run config as TOML; a JSON string is a TOML string as long as it is not reduced to ASCII."""
    return f"overrides = {json.dumps(shlex.join(overrides), ensure_ascii=False)}\n"


def start_superlink(place: Place, log: IO[str], *, environment: Mapping[str, str]) -> None:
    """Start a SuperLink on a free port of this machine, write the connection to it, wait until it listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (place.home / "config.toml").write_text(CONNECTION.format(port=port))
    command = [program("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    superlink = place.start(command, environment=environment, stdout=log)
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if superlink.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(f"Flower's SuperLink did not start, see {log.name}") from None
        time.sleep(0.02)


def submit(
    place: Place, app_dir: Path, overrides: Sequence[str], *, federation: str, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start ``flwr run`` on the SuperLink of the place; its standard output is the log of the run."""
    config_file = place.path / "run.toml"
    config_file.write_text(run_config(overrides), encoding="utf-8")
    command = [program("flwr"), "run", str(app_dir.resolve()), "private", "--stream"]
    command += ["--run-config", str(config_file), "--federation-config", federation]
    return place.start(command, environment=environment, stdout=subprocess.PIPE)


def follow(flwr_run: subprocess.Popen[str], log: IO[str], *, verbose: bool, pending_timeout: float) -> None:
    """Write all that ``flwr run --stream`` says to ``log``, print what matters, return when the run has ended."""
    assert flwr_run.stdout is not None
    shown: deque[str] = deque(maxlen=5)
    pending = threading.Timer(pending_timeout, flwr_run.kill)
    pending.start()
    try:
        for line in flwr_run.stdout:
            line = DECORATION.sub("", line)
            log.write(line)
            if not PENDING.match(line):
                pending.cancel()
            if verbose or not NOISE.match(line):
                print(line, end="", flush=True)
                shown.append(line.strip())
    finally:
        pending.cancel()
    if flwr_run.wait() == -signal.SIGKILL:
        raise RunFailed(f"the run was still pending after {pending_timeout:.0f} s, see {log.name}")
    if flwr_run.returncode != 0:
        raise RunFailed(f"`flwr run`: {' '.join(shown)}")


def run_status(listing: str) -> tuple[str, str]:
    """Status and details of the only run in the output of ``flwr list --format json``."""
    try:
        (entry,) = json.loads(listing)["runs"]
    except (ValueError, KeyError):
        return "unknown", "the SuperLink does not answer"
    return entry["status"], entry["status-details"]


def read_summary(path: Path, *, newer_than: int) -> dict[str, Any] | None:
    """Read the summary of a run; None if none is newer than ``newer_than`` (in ns): a resumed run finds an old one."""
    if not path.is_file() or path.stat().st_mtime_ns <= newer_than:
        return None
    return dict(json.loads(path.read_text(encoding="utf-8")))


def failure(status: str, details: str, summary: Mapping[str, Any] | None, *, rounds: int) -> str | None:
    """Why a run counts as failed; None if Flower, the summary and the number of rounds agree that it did not."""
    if summary is not None and summary["status"] != "finished":
        return str(summary["reason"])
    if status != "finished:completed":
        return f"Flower's status of the run is {status}: {details}"
    if summary is None:
        return "the ServerApp ended without writing summary.json"
    if summary["rounds"] != rounds:
        return f"only {summary['rounds']} of {rounds} rounds were run"
    return None
