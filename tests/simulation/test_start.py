"""Commands that train nothing start without slow imports: torch takes four seconds."""

import subprocess
import sys

import pytest

CHECK = """
import sys
from importlib import import_module
try:
    import_module(sys.argv.pop(1)).main()
finally:
    heavy = {"torch", "numpy", "flwr", "sklearn", "matplotlib", "ray"} & set(sys.modules)
    print(f"imported: {sorted(heavy)}", file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulation.cli", "--help"),
        ("simulation.cli", "--cfg", "job", "strategy=fedu", "method=byol"),
        ("simulation.cli", "strategy=fedav"),
        ("fedssl.runs.cli", "list"),
        ("fedssl.report.cli", "."),
    ],
    ids=" ".join,
)
def test_slow_imports_are_avoided(arguments, tmp_path):
    done = subprocess.run([sys.executable, "-c", CHECK, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.endswith("imported: []\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_not_an_error():
    shell = f"{sys.executable} -c 'from simulation.cli import main; main()' --help | true"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert done.stderr == ""


def test_cfg_job_prints_the_same_as_hydra():
    def show(*flag):
        arguments = ["strategy=fedu", "method=byol", "encoder.width=8", *flag]
        command = [sys.executable, "-c", "from simulation.cli import main; main()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert show("--cfg", "job") == show("--cfg=job")  # the latter is left to Hydra
