"""Packages import each other in one direction, and undocumented names of dependencies in ``..._internals.py``."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedssl", "strategies", "client_app", "server_app", "simulation", "examples", "deploy")
# Flower documents these; it may change all other modules in any release.
DOCUMENTED = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}


def test_import_contracts():
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


@cache
def imports(source: str) -> tuple[tuple[str, list[str]], ...]:
    return tuple(_imports(source))


def _imports(source: str) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield node.module or "", [name.name for name in node.names]
        elif isinstance(node, ast.Import):
            yield from ((name.name, []) for name in node.names)


def private(source: str) -> list[str]:
    found: list[str] = []
    if not re.search("flwr|ray|hydra|omegaconf", source):
        return found
    for module, names in imports(source):
        library = module.split(".")[0]
        if (library == "flwr" and module not in DOCUMENTED) or (
            library in ("ray", "hydra", "omegaconf")
            and (any(part.startswith("_") for part in [*module.split("."), *names]) or "override_parser" in module)
        ):
            found.append(module)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_private_names_are_in_internals_modules(package):
    files = [file for file in (ROOT / package).rglob("*.py") if not file.stem.endswith("_internals")]
    assert {str(file): names for file in files if (names := private(file.read_text()))} == {}


def test_private_names_are_found():
    source = "import ray._private\ndef f():\n    from flwr.common import serde\n    from hydra import _internal"
    assert private(source) == ["ray._private", "flwr.common", "hydra"]
    assert private("from flwr.app import Message\nfrom hydra import compose\nimport ray") == []


def test_every_imported_library_is_declared():
    """``markupsafe`` or ``httpx`` may vanish from the requirements of others, which then breaks an installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    declared = {re.split(r"[\[<>=; ]", line)[0].lower().replace("_", "-") for line in project["dependencies"] + extras}
    libraries = {
        module.split(".")[0]
        for package in ("fedssl", "strategies", "client_app", "server_app", "simulation")
        for file in (ROOT / package).rglob("*.py")
        for module, _ in imports(file.read_text())
    }
    of_others = {"_typeshed", "ray", "triton"}  # of mypy, flwr[simulation], torch
    others = libraries - set(sys.stdlib_module_names) - set(PACKAGES) - of_others
    owners = {"mlflow": ["mlflow-skinny"], "umap": ["umap-learn"]} | packages_distributions()
    names = {name: [owner.lower().replace("_", "-") for owner in owners.get(name, [name])] for name in others}
    assert {name: owners for name, owners in names.items() if not declared & set(owners)} == {}
