"""Federated self-supervised learning: the learning library, independent of servers and clients."""


def __getattr__(name: str) -> str:
    """Return ``__version__``, that of the clone with this file, or else of the installed package."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import tomllib
    from importlib.metadata import version
    from pathlib import Path

    file = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.is_file() else {}
    return str(project["version"]) if project.get("name") == "fedssl" else version("fedssl")
