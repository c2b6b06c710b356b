"""What griffe reads of docstrings: parameters that share a text, ``a, b : float``, one by one.

Griffe gives all of them the default of the first.
"""

import re
from typing import Any

from griffe import Extension, Object

_GROUP = re.compile(r"^([ ]*)(\w+(?:, \w+)+)( : .*)?\n((?:(?:\1[ ]+.*)?\n)*?(?:\1[ ]+.*(?:\n|\Z)))", flags=re.MULTILINE)
_SECTION = re.compile(r"(^[ ]*Parameters\n[ ]*-+\n)(.*?)(?=^\w[\w ]*\n-+\n|\Z)", flags=re.DOTALL | re.MULTILINE)


class OneByOne(Extension):
    """Divides what docstrings say of several parameters."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = divided(obj.docstring.value)


def divided(text: str) -> str:
    """The docstring with an entry of its own for every parameter."""
    return _SECTION.sub(lambda found: found[1] + _GROUP.sub(_entries, found[2]), text)


def _entries(group: re.Match[str]) -> str:
    indent, names, kind, said = group.groups()
    said = said if said.endswith("\n") else f"{said}\n"
    return "".join(f"{indent}{name}{kind or ''}\n{said}" for name in names.split(", "))
