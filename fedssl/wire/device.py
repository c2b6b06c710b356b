"""Names of devices, and versions of packages on two machines. Imports no torch."""

import platform
import re
from collections.abc import Mapping
from importlib.metadata import version

from fedssl.errors import InputError

COMPARED_PACKAGES = ("flwr", "torch", "torchvision")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of `COMPARED_PACKAGES` here."""
    return {"python": platform.python_version(), **{name: version(name) for name in COMPARED_PACKAGES}}


def incompatibility(versions: Mapping[str, str]) -> str:
    """Return why another machine with these versions cannot work with this one; empty if it can.

    Flower's protocol changes with its minor versions. The server sends this project's code with the run. Another torch
    or Python may change the last bits of an update.
    """
    here = version("flwr")
    there = versions.get("flwr", here)
    if here.split(".")[:2] != there.split(".")[:2]:
        return f"has flwr {there} and flwr {here} is installed here; install the same minor version"
    return ""


def check_device_name(name: str) -> None:
    """Raise `InputError` if the name of an edge client cannot name a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}", name):
        raise InputError(
            f"client-name={name[:60]!r} is not a valid client name; use 1 to 40 letters, digits, _, - and ., beginning "
            "with a letter, a digit or _"
        )
