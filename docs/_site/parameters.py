"""Extension of griffe that splits parameters with a shared description, ``a, b : float``.

Without it griffe gives all of them the default of the first.
"""

import re
from typing import Any

from griffe import Extension, Object

_GROUP = re.compile(r"^([ ]*)(\w+(?:, \w+)+)( : .*)?\n((?:(?:\1[ ]+.*)?\n)*?(?:\1[ ]+.*(?:\n|\Z)))", flags=re.MULTILINE)
_SECTION = re.compile(r"(^[ ]*Parameters\n[ ]*-+\n)(.*?)(?=^\w[\w ]*\n-+\n|\Z)", flags=re.DOTALL | re.MULTILINE)


class OneByOne(Extension):
    """Splitter of shared parameter entries."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = divided(obj.docstring.value)


def divided(text: str) -> str:
    """Return the docstring with one entry per parameter."""
    return _SECTION.sub(lambda match: match[1] + _GROUP.sub(_entries, match[2]), text)


def _entries(group: re.Match[str]) -> str:
    indent, names, kind, text = group.groups()
    text = text if text.endswith("\n") else f"{text}\n"
    return "".join(f"{indent}{name}{kind or ''}\n{text}" for name in names.split(", "))
