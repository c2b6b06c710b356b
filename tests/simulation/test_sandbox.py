"""Whatever ends a run or the owner of a sandbox, no processes and files are left."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedssl.machine.process import available_cores
from simulation.sandbox import sandbox_pids
from tests.runs import read_summary

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.heavy
@pytest.mark.parametrize("seconds", [0.1, 1, 3])
def test_sigterm_while_ray_starts_ends_the_run(seconds):
    with own_temporary_folder() as folder:
        process = start(folder, "output_dir=run", "threads=1")
        wait_until(lambda: list(folder.glob("fssl-*")), seconds=60)
        (sandbox,) = folder.glob("fssl-*")
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 128 + signal.SIGTERM, output
        assert output.splitlines()[-1].startswith("fedssl: stopped by SIGTERM")
        assert "Traceback" not in output
        assert gone(folder, sandbox)


TINY = ["num_clients=3", "local_epochs=1", "dataset.limit=60", "encoder.width=4", "threads=1", "evaluation=none"]
TINY += ["final_evaluation=none", "collapse_images=0", "measure_resources=false", "engine=ray"]


@contextmanager
def own_temporary_folder():
    """A private folder for sandboxes, whose path is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        yield Path(folder)


def start(folder, *overrides):
    """Start the command in a new session; its sandboxes are in ``folder``."""
    command = [sys.executable, "-c", "from fedssl.command_line import fedssl; fedssl()", *TINY, *overrides]
    environment = os.environ | {"RAY_TMPDIR": str(folder), "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    )


def read_until(process, overrides):
    output = ""
    for line in process.stdout:
        output += line
        if overrides in line:
            return output
    pytest.fail(f"{overrides!r} was not output but:\n{output}")


def gone(folder, sandbox):
    deadline = time.monotonic() + 60
    while (sandbox_pids(sandbox) or list(folder.glob("fssl-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not sandbox_pids(sandbox) and not list(folder.glob("fssl-*"))


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.heavy)])
def test_an_interrupted_round_leaves_no_processes_or_files(number):
    with own_temporary_folder() as folder:
        process = start(folder, "rounds=1000", f"engine.client_cpus={available_cores()}", "output_dir=run")
        read_until(process, "round 2/1000")
        (sandbox,) = folder.glob("fssl-*")
        assert len(sandbox_pids(sandbox)) >= 4  # Ray's daemons and an actor
        if number == signal.SIGINT:  # as Ctrl-C in a terminal: everybody in the group hears it
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == (-9 if number == signal.SIGKILL else 130), output
        assert gone(folder, sandbox)
        if number != signal.SIGKILL:
            summary = read_summary(folder / "run")
            assert (summary["status"], summary["reason"]) == ("interrupted", "stopped by the user")
            assert 1 <= summary["rounds"] < 1000
            message = f"fedssl: stopped after round {summary['rounds']}; continue with: fedssl resume="
            assert output.splitlines()[-1].startswith(message)
            assert "Traceback" not in output


def wait_until(condition, *, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_owner_of_the_sandbox(number):
    script = (
        "import os, subprocess\n"
        "from simulation.sandbox import process_sandbox\n"
        "with process_sandbox() as sandbox:\n"
        "    process = sandbox.start(['sleep', '1000'], environment=os.environ, stdout=subprocess.DEVNULL)\n"
        "    print(sandbox.path, flush=True)\n"
        "    process.wait()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )
    sandbox = Path(owner.stdout.readline().strip())
    assert sandbox_pids(sandbox)
    owner.send_signal(number)
    owner.communicate()
    assert wait_until(lambda: not sandbox_pids(sandbox), seconds=60)
    assert wait_until(lambda: not sandbox.exists(), seconds=60)
