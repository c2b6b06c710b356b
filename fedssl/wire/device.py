"""Names of devices, the versions that a device may have, and the fingerprint of the code. Imports no torch.

A device trains with the server's code, which Flower sends with every run, and compares its fingerprint with that of
every plan. The environment of the device provides Python, Flower and the other dependencies. Its installed ``fedssl``
provides only the command ``fedssl-device``. Therefore

- Python and the dependencies must meet the requirements of the server's code, see `unmet_requirements`; otherwise the
  device refuses every message,
- Flower must have the minor version of the server, see `incompatibility`; otherwise the device does not take part,
- all other versions may differ, see `differences`, and are logged. Another torch or Python may change the last bits of
  an update.
"""

import functools
import platform
import re
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fedssl.digests import new_identity
from fedssl.errors import InputError, shortened

COMPARED_PACKAGES = ("fedssl", "flwr", "torch", "torchvision")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of those of `COMPARED_PACKAGES` that are installed here."""
    versions = {name: installed_version(name) for name in COMPARED_PACKAGES}
    return {"python": platform.python_version(), **{name: found for name, found in versions.items() if found}}


def incompatibility(versions: Mapping[str, str]) -> str:
    """Return why another machine with these versions cannot work with this one; empty if it can."""
    here = version("flwr")
    there = versions.get("flwr", here)
    if here.split(".")[:2] != there.split(".")[:2]:
        return f"has flwr {there} and flwr {here} is installed here; install the same minor version"
    return ""


def differences(versions: Mapping[str, str]) -> str:
    """Return the versions of another machine that differ from those here; empty if none do."""
    here = installed_versions()
    return ", ".join(
        f"{name} {there} (here {here[name]})" for name, there in versions.items() if here.get(name, there) != there
    )


def unmet_requirements(app: Path) -> str:
    """Return what the app in a folder needs and this environment lacks; empty if it lacks nothing.

    The requirements are those of ``pyproject.toml``. Suffixes of installed versions are ignored: vendors build torch
    2.11.0a0+x for devices.
    """
    project = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    unmet = [
        f"{text} (installed: {found or 'none'})"
        for text in project["dependencies"]
        if not _meets(found := installed_version(Requirement(text).name), Requirement(text).specifier)
    ]
    if not _meets(platform.python_version(), SpecifierSet(project["requires-python"])):
        unmet.insert(0, f"Python {project['requires-python']} (installed: {platform.python_version()})")
    if not unmet:
        return ""
    return f"fedssl {project['version']} needs {shortened(unmet, maximum=3)}"


def check_device_name(name: str) -> None:
    """Raise `InputError` if the name of an edge client cannot name a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}", name):
        raise InputError(
            f"client-name={name[:60]!r} is not a valid client name; use 1 to 40 letters, digits, _, - and ., beginning "
            "with a letter, a digit or _"
        )


def installed_version(package: str) -> str:
    """Return the version of an installed package, else an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _meets(found: str, specifier: SpecifierSet) -> bool:
    return bool(found) and specifier.contains(Version(found).base_version)


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("client_app", "fedssl", "server_app", "strategies")  # included in Flower's app bundle


@functools.cache
def code_fingerprint() -> str:
    """Return a hash of all source files of `PACKAGES`, 16 hexadecimal digits."""
    digest = new_identity()
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
