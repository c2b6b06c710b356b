"""Ctrl-C, SIGTERM and SIGHUP at any moment of the five commands."""

import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.run import run

# Sends a signal to itself when it imports a module or opens a file for the n-th time; for n = 0 counts these events.
PROGRAM = """
import os, sys
from fedssl import command_line
name, signal, last = sys.argv.pop(1), int(sys.argv.pop(1)), int(sys.argv.pop(1))
count = 0
def hook(event, arguments):
    global count
    if event in ("import", "open"):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal)
        if last == 0:
            os.write(3, b".")
sys.addaudithook(hook)
getattr(command_line, name)()
"""
QUICK = "num_clients=2 clients_per_round=1 rounds=2 local_epochs=1 encoder.width=4 dataset.limit=100 engine=local"
COMMANDS = {
    "fedssl": f"{QUICK} threads=1 measure_resources=false",
    "fedssl_evaluate": "run=run evaluation=knn",
    "fedssl_export": "run=run format=safetensors",
    "fedssl_report": "run",
    "fedssl_runs": "list run",
}
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("signals")
    run([*shlex.split(QUICK), "evaluate_every=0", "final_evaluation=knn", f"output_dir={folder / 'run'}"])
    return folder


def call(command: str, number: int, moment: int, folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", PROGRAM, command, str(int(number)), str(moment)]
    # A shell's background jobs ignore Ctrl-C.
    return subprocess.run(
        [*arguments, *shlex.split(COMMANDS[command])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in SIGNALS],
    )


def check(ended: subprocess.CompletedProcess[str], command: str, number: signal.Signals) -> None:
    cause = "" if number == signal.SIGINT else f" by {number.name}"
    start = f"{command.replace('_', '-')}: stopped{cause}"
    if ended.returncode == 0:  # the signal was ignored, because the command had ended
        assert ended.stderr == ""
        return
    assert ended.returncode == 128 + number, ended.stderr
    assert ended.stderr.startswith(start), ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_during_imports(command: str, folder: Path) -> None:
    number = SIGNALS[list(COMMANDS).index(command) % 3]
    check(call(command, number, 10, folder), command, number)
    assert call(command, number, 10, folder).returncode == 128 + number


@pytest.mark.heavy
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", COMMANDS)
def test_at_any_moment(command: str, number: signal.Signals, folder: Path) -> None:
    counted = call_with_count(command, folder)
    generator = random.Random(f"{command} {number}")
    moments = [generator.randrange(1, counted) for _ in range(3)]
    print(moments)
    ended = [call(command, number, moment, folder) for moment in moments]
    for each in ended:
        check(each, command, number)
    assert sum(each.returncode != 0 for each in ended) > len(moments) / 2


def call_with_count(command: str, folder: Path) -> int:
    """Return how often a command imports a module or opens a file."""
    shell = shlex.join([sys.executable, "-c", PROGRAM, command, "0", "0", *shlex.split(COMMANDS[command])])
    counted = subprocess.run(["bash", "-c", f"{shell} 3>&1 >/dev/null"], cwd=folder, capture_output=True, text=True)
    assert counted.returncode == 0, counted.stderr
    return len(counted.stdout)


SLOW = """
import time
def main():
    try:
        print("running", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("closing", flush=True)
        time.sleep(60)
"""


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, "-c", "from fedssl.command_line import _main; _main('fedssl', 'slow')"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in SIGNALS],
    )
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "closing\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM


DISCARDS = {
    "finalizer": """
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
def main():
    Last()
""",
    "fork": """
def main():
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(1))
    if not os.fork():
        os._exit(0)
""",
}


@pytest.mark.parametrize("where", DISCARDS)
def test_a_signal_that_python_discards_stops_the_command(tmp_path: Path, where: str) -> None:
    """Exceptions in finalizers and callbacks of a fork are printed and discarded, an interrupt too."""
    program = f"import os, signal, time{DISCARDS[where]}    time.sleep(20)\n    print('went on')\n"
    (tmp_path / "quick.py").write_text(program)
    ended = subprocess.run(
        [sys.executable, "-c", "from fedssl.command_line import _main; _main('fedssl', 'quick')"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "", "fedssl: stopped by SIGTERM\n")


def test_a_signal_that_an_import_discards_stops_the_command(tmp_path: Path) -> None:
    """As torch does while it imports NumPy."""
    discard = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    (tmp_path / "quick.py").write_text(f"{discard}def main():\n    print('started')\n")
    ended = subprocess.run(
        [sys.executable, "-c", "from fedssl.command_line import _main; _main('fedssl', 'quick')"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "fedssl: stopped\n")


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    (tmp_path / "quick.py").write_text("import os, signal\ndef main():\n    os.kill(os.getpid(), signal.SIGHUP)\n")
    ended = subprocess.run(
        [sys.executable, "-c", "from fedssl.command_line import _main; _main('fedssl', 'quick')"],
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert ended.returncode == 0
