"""Extensions of griffe for the docstrings of this project."""

import itertools
import re
from typing import Any

from griffe import Class, Docstring, Extension, Object
from latex2mathml.converter import convert

_GROUP = re.compile(r"^([ ]*)(\w+(?:, \w+)+)( : .*)?\n((?:(?:\1[ ]+.*)?\n)*?(?:\1[ ]+.*(?:\n|\Z)))", flags=re.MULTILINE)
_SECTION = re.compile(r"(^[ ]*Parameters\n[ ]*-+\n)(.*?)(?=^\w[\w ]*\n-+\n|\Z)", flags=re.DOTALL | re.MULTILINE)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", flags=re.DOTALL)
_FIELD = re.compile(r" {4}\w+: .*?(?:  # (.+))?")


class OneByOne(Extension):
    """Splitter of shared parameter entries, ``a, b : float``; griffe gives all of them the default of the first."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = divided(obj.docstring.value)


class Equations(Extension):
    """Renderer of the LaTeX between dollars of docstrings that have a displayed equation, ``$$``."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring is not None and "$$" in obj.docstring.value:
            obj.docstring.value = with_mathml(obj.docstring.value)


class FieldComments(Extension):
    """Reader of the comments at the fields of a class, which describe them."""

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Make the comment behind a field, or those above it, its docstring."""
        lines = cls.source.splitlines()
        for field in cls.attributes.values():
            if not field.is_alias and field.docstring is None and field.lineno and cls.lineno:
                comment = field_comment(lines, field.lineno - cls.lineno)
                field.docstring = Docstring(comment, parent=field) if comment else None


def with_mathml(text: str) -> str:
    """Replace LaTeX between dollars by MathML, which browsers render without a script."""

    def to_mathml(match: re.Match[str]) -> str:
        block = match[1] is not None
        formula = convert(match[1] or match[2], display="block" if block else "inline").replace("|", "&#124;")
        # Markdown parses a line that starts with <math as a block.
        return f"\n<div>{formula}</div>\n" if block else f"<span>{formula}</span>"

    return _FORMULA.sub(to_mathml, text)


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
