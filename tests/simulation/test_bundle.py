"""The bundle (FAB) that Flower ships to server and clients."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    flwr = Path(sys.executable).with_name("flwr")
    subprocess.run([flwr, "build", "--app", ROOT], cwd=folder, check=True, capture_output=True)
    (file,) = folder.glob("*.fab")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "app")
    return folder / "app"


def test_contains_exactly_the_needed_files(bundle):
    packages = ("client_app", "fedssl", "server_app", "strategies")
    expected = {file for package in packages for file in (ROOT / package).rglob("*.py")}
    expected |= set((ROOT / "conf").rglob("*.yaml"))
    expected |= {ROOT / name for name in ("LICENSE", "README.md", "pyproject.toml")}
    held = {str(file.relative_to(bundle)) for file in bundle.rglob("*") if file.is_file()}
    assert {name for name in held if not name.startswith(".info")} == {str(file.relative_to(ROOT)) for file in expected}


def test_runs_from_the_bundle_alone(bundle):
    code = """
import pathlib, client_app.app, server_app.app, fedssl.config.load, fedssl.wire.identity
settings = fedssl.config.load.compose(["strategy=l_dawa", "partition.alpha=0.1"])
for module in (client_app.app, server_app.app, fedssl.config.load):
    assert pathlib.Path(module.__file__).is_relative_to(pathlib.Path.cwd()), module.__file__
print(fedssl.wire.identity.code_fingerprint())
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=bundle, check=True, capture_output=True, text=True)
    from fedssl.wire.identity import code_fingerprint

    assert ran.stdout.strip() == code_fingerprint()
