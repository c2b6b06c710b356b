"""The commands of "Three devices on one machine" in docs/deployment.md, in their order."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedssl.fleet.encoders import stored_encoders
from simulation.sandbox import process_sandbox
from tests.devices import write_images
from tests.flower import ENVIRONMENT, ROOT, free_port

SMALL = "local_epochs=1 encoder.width=4 batch_size=8 threads=1 evaluation=none collapse_images=0"


def tutorial(folder: Path) -> str:
    """Return the commands for other folders and ports, and with a small model."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    section = re.search(r"^## Three devices on one machine\n(.*?)^## ", text, flags=re.DOTALL | re.MULTILINE)[1]
    script = "\n".join(re.findall(r"^```\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE))
    port = str(free_port())
    for old, new in (("8000", port), ("/tmp/devices", f"{folder}/devices"), ("/tmp/fedssl-fleet", f"{folder}/run")):
        script = script.replace(old, new)
    script = script.replace("/my/", f"{folder}/images/").replace("port=9094", f"port={free_port()}")
    script = script.replace("python deploy/keys.py", f"{sys.executable} {ROOT}/deploy/keys.py")
    script = script.replace("rounds=3", f"rounds=2 engine.address=127.0.0.1:{port} {SMALL}")
    return f"set -e\n{script}\nfedssl-fleet list --run {folder}/run --json > devices.json\n"


@pytest.mark.heavy
def test_the_tutorial_trains_and_lists_three_devices(tmp_path):
    for number, name in enumerate(("garden", "roof", "shed")):
        write_images(tmp_path / "images" / name, 9 + number, seed=number)
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
            timeout=500,
        )
        logs = "\n".join(file.read_text() for file in sandbox.work.glob("*.log"))
        assert process.returncode == 0, process.stdout + process.stderr + logs
        devices = json.loads((sandbox.work / "devices.json").read_text())
    assert [(row["name"], row["status"], row["images"], row["rounds"]) for row in devices] == [
        ("garden", "online", 9, 2),
        ("roof", "online", 10, 2),
        ("shed", "online", 11, 2),
    ]
    expected = (tmp_path / "run" / "encoder.pt").read_bytes()
    for name in ("garden", "roof", "shed"):
        ((file, fields),) = stored_encoders(tmp_path / "devices" / name / "states")
        assert file.read_bytes() == expected
        assert fields["signed"]
