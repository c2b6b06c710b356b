"""Packages that only exports need, which ``pip install 'fedssl[export]'`` brings."""

from importlib.util import find_spec

from fedssl.errors import InputError


def need(what: str, *packages: str) -> None:
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
        raise InputError(f"{what} needs {' and '.join(missing)}; run pip install 'fedssl[export]'")
