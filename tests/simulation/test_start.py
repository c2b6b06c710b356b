"""Commands that train nothing start without slow imports: torch takes four seconds."""

import shlex
import subprocess
import sys
from importlib import metadata

import pytest

import fedssl
from fedssl import command_line
from simulation.cli import main

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


@pytest.mark.heavy
@pytest.mark.parametrize("module", ["fedssl.fleet.cli", "fedssl.fleet.device_cli"])
def test_commands_of_fleets_start_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("reader", ["true", pytest.param("head -1", marks=pytest.mark.heavy)])
def test_a_closed_pipe_is_not_an_error(reader):
    shell = f"{shlex.quote(sys.executable)} -c 'from fedssl.command_line import fedssl; fedssl()' --help | {reader}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["fedssl", "fedssl_device", "fedssl_evaluate"])
def test_every_command_prints_its_version(name, monkeypatch, capsys):
    """Also in a clone that is not installed."""
    monkeypatch.setattr(sys, "argv", ["command", "--version"])
    monkeypatch.setattr(metadata, "version", lambda name: pytest.fail("the clone has its own version"))
    getattr(command_line, name)()
    assert capsys.readouterr().out == f"{name.replace('_', '-')} 0.1.0\n"
    with pytest.raises(AttributeError, match="no attribute 'version'"):
        _ = fedssl.version


def test_cfg_job_prints_the_same_as_hydra(monkeypatch, capsys):
    def show(*flag):
        monkeypatch.setattr(sys, "argv", ["fedssl", "strategy=fedu", "method=byol", "encoder.width=8", *flag])
        main()
        return capsys.readouterr().out

    assert show("--cfg", "job") == show("--cfg=job")  # the latter is left to Hydra
