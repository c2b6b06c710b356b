"""Versions of two machines, and requirements of the server's code in the environment of a device."""

import platform
from importlib.metadata import version

import pytest

from fedssl.wire import device
from fedssl.wire.device import COMPARED_PACKAGES, differences, incompatibility, installed_versions, unmet_requirements
from tests.flower import ROOT


def app(folder, *dependencies, python=">=3.11"):
    """Write the pyproject.toml of an app with these dependencies; return its folder."""
    listed = ", ".join(f'"{text}"' for text in dependencies)
    text = f'[project]\nversion = "9.1"\nrequires-python = "{python}"\ndependencies = [{listed}]\n'
    (folder / "pyproject.toml").write_text(text)
    return folder


@pytest.fixture
def installed(monkeypatch):
    """Versions of packages that this test installs."""
    versions = {"torch": "2.11.0a0+nv24.8", "xxhash": "3.5.0"}
    monkeypatch.setattr(device, "installed_version", lambda name: versions.get(name, ""))
    return versions


def test_this_environment_meets_the_requirements():
    assert unmet_requirements(ROOT) == ""


@pytest.mark.parametrize(
    ("dependencies", "unmet"),
    [
        (["torch>=2.11", "xxhash>=3,<4"], ""),
        (["torch[extra] >=2.11.1", "xxhash"], "torch[extra] >=2.11.1 (installed: 2.11.0a0+nv24.8)"),
        (["xxhash>=3,<3.5"], "xxhash>=3,<3.5 (installed: 3.5.0)"),
        (["xxhash>=4", "other"], "xxhash>=4 (installed: 3.5.0), other (installed: none)"),
        (["a", "b", "c", "d", "e"], "a (installed: none), b (installed: none), c (installed: none) and 2 more"),
    ],
)
def test_requirements_of_dependencies(dependencies, unmet, installed, tmp_path):
    assert unmet_requirements(app(tmp_path, *dependencies)) == (f"fedssl 9.1 needs {unmet}" if unmet else "")


def test_requirements_of_python(tmp_path):
    here = platform.python_version()
    assert unmet_requirements(app(tmp_path, python=f"=={here}")) == ""
    assert unmet_requirements(app(tmp_path, python=">=4")) == f"fedssl 9.1 needs Python >=4 (installed: {here})"


def test_versions_that_differ(monkeypatch):
    here = installed_versions()
    assert here["fedssl"] == version("fedssl")
    assert here.keys() == {"python", *COMPARED_PACKAGES}
    assert differences(here) == differences({}) == ""
    assert differences(here | {"fedssl": "0.0.1"}) == f"fedssl 0.0.1 (here {here['fedssl']})"
    assert incompatibility(here | {"fedssl": "0.0.1", "torch": "2.0.0", "python": "3.0"}) == ""
    assert incompatibility(here | {"flwr": "1.30.2"}).startswith(f"has flwr 1.30.2 and flwr {here['flwr']} ")
    monkeypatch.setattr(device, "COMPARED_PACKAGES", ("flwr", "no-such-package"))
    assert installed_versions().keys() == {"python", "flwr"}  # a device needs only the dependencies
    assert differences({"torch": "2.0.0"}) == ""
