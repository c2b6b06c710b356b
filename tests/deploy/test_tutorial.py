"""The commands of docs/deployment.md: the tutorial runs, all others are valid."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedssl.config.load import load_settings
from fedssl.fleet import cli, device_cli
from fedssl.fleet.encoders import stored_encoders
from simulation.sandbox import process_sandbox
from tests.flower import ENVIRONMENT, ROOT, free_port

PAGE = (ROOT / "docs" / "deployment.md").read_text()
SMALL = "local_epochs=1 encoder.width=4 batch_size=8 threads=1 evaluation=none collapse_images=0"
DEVICES = ("garden", "roof", "shed", "barn", "gate")


def blocks(text: str) -> list[str]:
    """Return the blocks of commands."""
    return re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def tutorial(folder: Path) -> str:
    """Return the commands for other folders and ports, and with a small model."""
    section = re.search(r"^## Tutorial.*?\n(.*?)^## ", PAGE, flags=re.DOTALL | re.MULTILINE)[1]
    script = "\n".join(blocks(section))
    port = str(free_port())
    for old, new in (("8000", port), ("/tmp/fleet", str(folder)), ("port=9094", f"port={free_port()}")):
        script = script.replace(old, new)
    script = script.replace("python deploy/keys.py", f"{sys.executable} {ROOT}/deploy/keys.py")
    script = script.replace("rounds=3", f"rounds=3 engine.address=127.0.0.1:{port} {SMALL}")
    script = script.replace("rounds=5", f"rounds=5 engine.address=127.0.0.1:{port}")
    listing = f"fedssl-fleet list --run {folder}/run --json > devices.json\n"
    return f"set -e\n{script}".replace("kill $(jobs -pr)\n", f"{listing}kill $(jobs -pr)\n")


@pytest.mark.heavy
def test_the_tutorial_trains_five_devices_and_removes_one(tmp_path):
    with process_sandbox() as sandbox:
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(sandbox.home),
            "OMP_NUM_THREADS": "1",
        }
        environment["FLWR_HOME"] = f"{sandbox.home}/.flwr"  # the default, which the tutorial names
        process = subprocess.run(
            ["bash", "-c", tutorial(tmp_path)],
            cwd=sandbox.work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        logs = "\n".join(file.read_text() for file in sandbox.work.glob("*.log"))
        assert process.returncode == 0, process.stdout + process.stderr + logs
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
    assert "5 of 10 rounds" not in process.stdout  # the status was shown after three
    assert "3 of 10 rounds" in process.stdout


def commands():
    """Return the commands of this project outside of the tutorial: in blocks and in tables."""
    page = re.sub(r"^## Tutorial.*?^## ", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`(fedssl(?:-fleet|-device)? [^` ]+ [^`]+)`", page.replace("\n", " "))
    return sorted({line.partition("#")[0].strip() for line in (*lines, *inline) if line.startswith("fedssl")})


@pytest.mark.parametrize("command", commands())
def test_other_commands_of_the_page_are_valid(command, tmp_path):
    program, *arguments = shlex.split(command)
    if program == "fedssl":
        resumed = any(argument.startswith("resume=") for argument in arguments)
        load_settings([argument for argument in arguments if not (resumed and argument.startswith("resume="))])
        return
    parser = {"fedssl-fleet": cli, "fedssl-device": device_cli}[program]._parser()
    parser.parse_args(arguments)
