"""The bundle (FAB) that Flower ships to server and clients."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fedssl.fleet.control_internals import build_fab
from fedssl.wire.device import code_fingerprint
from tests.flower import ROOT, copy_app


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    flwr = Path(sys.executable).with_name("flwr")
    app = copy_app(folder / "repository")
    subprocess.run([flwr, "build", "--app", app], cwd=folder, check=True, capture_output=True)
    (file,) = folder.glob("*.fab")
    assert build_fab(ROOT) == file.read_bytes()
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


PROGRAM = """
import pathlib, sys, client_app.app, server_app.app, fedssl.config.load, fedssl.wire.device
for module in (client_app.app, server_app.app, fedssl.config.load):
    assert pathlib.Path(module.__file__).is_relative_to(pathlib.Path.cwd()), module.__file__

import torch, fedssl.partition
from fedssl.datasets.images import TensorImages
from fedssl.encoders import conv_small
fedssl.config.load.compose(["strategy=l_dawa", "partition.alpha=0.1"])
images = fedssl.partition.ImageSubset(TensorImages(torch.zeros(20, 1, 1, 1, dtype=torch.uint8)), torch.arange(20))
data = fedssl.partition.PartitionInput(labels=None, owners=None, images=images, num_clients=2, seed=0)
fedssl.partition.iid(data)
conv_small(channels=1, size=8)
slow = {"datasets", "flwr_datasets", "matplotlib", "pandas", "ray", "sklearn", "torchvision"} & set(sys.modules)
assert not slow, slow
print(fedssl.wire.device.code_fingerprint())
"""


@pytest.mark.heavy
def test_apps_run_from_the_bundle_alone_without_slow_imports(bundle):
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=bundle, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == code_fingerprint()
