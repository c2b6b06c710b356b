"""Federated self-supervised learning: the learning library, independent of servers and clients.

import fedssl

run = fedssl.run(strategy="fedavg", dataset="folder", path="photos", rounds=20)
run.metrics, run.plot(), run.encoder
"""

from typing import Any

from fedssl.lazy import lazy_names

__all__, _get, __dir__ = lazy_names(
    __name__,
    dict.fromkeys(("Composed", "Run", "compose", "load", "run"), "fedssl.api")
    | dict.fromkeys(("InputError", "RunError"), "fedssl.errors")
    | {name: f"fedssl.{name}" for name in ("embedding", "encoders", "evaluation", "export", "losses", "partition")},
)


def __getattr__(name: str) -> Any:
    """Import a public name; ``__version__`` is that of the clone with this file, or else of the installed package."""
    if name != "__version__":
        return _get(name)
    import tomllib
    from importlib.metadata import version
    from pathlib import Path

    file = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.is_file() else {}
    return str(project["version"]) if project.get("name") == "fedssl" else version("fedssl")
