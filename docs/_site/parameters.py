"""Extensions of griffe for the docstrings of this project."""

import itertools
import re
from typing import Any

from griffe import Class, Docstring, Extension, Object

_GROUP = re.compile(r"^([ ]*)(\w+(?:, \w+)+)( : .*)?\n((?:(?:\1[ ]+.*)?\n)*?(?:\1[ ]+.*(?:\n|\Z)))", flags=re.MULTILINE)
_SECTION = re.compile(r"(^[ ]*Parameters\n[ ]*-+\n)(.*?)(?=^\w[\w ]*\n-+\n|\Z)", flags=re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r" {4}\w+: .*?(?:  # (.+))?")


class OneByOne(Extension):
    """Splitter of shared parameter entries, ``a, b : float``; griffe gives all of them the default of the first."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = divided(obj.docstring.value)


class FieldComments(Extension):
    """Reader of the comments at the fields of a class, which describe them."""

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Make the comment behind a field, or those above it, its docstring."""
        lines = cls.source.splitlines()
        for field in cls.attributes.values():
            if not field.is_alias and field.docstring is None and field.lineno and cls.lineno:
                comment = field_comment(lines, field.lineno - cls.lineno)
                field.docstring = Docstring(comment, parent=field) if comment else None


def divided(text: str) -> str:
    """Return the docstring with one entry per parameter."""
    return _SECTION.sub(lambda match: match[1] + _GROUP.sub(_entries, match[2]), text)


def field_comment(lines: list[str], index: int) -> str:
    """Return the comment behind the field in a line, or else above it; empty without a comment or a field."""
    field = _FIELD.fullmatch(lines[index])
    above = itertools.takewhile(lambda line: line.startswith("    # "), reversed(lines[:index]))
    return (field[1] or " ".join(line[6:] for line in reversed([*above]))) if field else ""


def _entries(group: re.Match[str]) -> str:
    indent, names, kind, text = group.groups()
    text = text if text.endswith("\n") else f"{text}\n"
    return "".join(f"{indent}{name}{kind or ''}\n{text}" for name in names.split(", "))
