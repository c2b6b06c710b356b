"""Packages that only exports need, which ``uv sync --extra export`` brings."""

from importlib.util import find_spec

from fedssl.errors import InputError


def require_packages(what: str, *packages: str) -> None:
    """Refuse, by an `InputError`, what cannot be done because a package is not installed.

    Parameters
    ----------
    what : str
        What needs them, as the sentence begins.
    packages : str
        As they are imported.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        said = f"install it: uv sync --extra export, or pip install {' '.join(missing)}"
        raise InputError(f"{what} needs {' and '.join(missing)}; {said}")
