"""Public names of packages that are imported when they are used first, because torch and other imports are slow.

The types of such a package are in its ``__init__.pyi``.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package, from the modules of its public names.

    A name that ends its module, such as ``losses`` of ``fedssl.losses``, is the module itself.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name])
        return module if modules[name] == f"{package}.{name}" else vars(module)[name]

    return sorted(modules), get, lambda: sorted(modules)
