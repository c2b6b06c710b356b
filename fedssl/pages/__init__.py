"""HTML pages that need nothing but themselves: Jinja2 templates, one stylesheet, and no access to the network.

A template is named by its path in the package ``fedssl`` and lies in the package of its feature. It extends
``pages/base.html.j2``. Files beside it with its name and the endings ``.css`` and ``.js`` are its own style and script,
which may have parts. Text is escaped. The Content-Security-Policy allows this script alone, by its hash, and images
inside the page. A page may be sent to others: absolute paths are shortened (`hide_paths`).
"""

import io
import re
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from fedssl.digests import new_identity
from fedssl.errors import sanitize

ROOT = Path(__file__).parents[1]
ENDING = ".html.j2"
_START = r"(?:^|(?<=[\s='\":(\[{,])|(?<=file://)|(?<=:///))"  # of a path in a text, or in a URL of a local file
_QUOTED = re.compile(r"(?:^|(?<=\s))'[^'\n]*'")  # a setting of a command, whose paths may have spaces
_INNER_PARENTS = re.compile(r"(?<=[',{=])/(?:[^/',{}\n]+/)*(?=[^/',{}\n])")
_WHOLE = re.compile(r"/[^\n'\":;,()]*/([^/\s]+/?)")  # a text that is a path, with spaces
_PARENTS = re.compile(_START + r"/(?:[^/\s'\"=:;,()\[\]{}<>]+/)*(?=[^/\s])")


def render(
    template_name: str, *, data: Any = None, polls: bool = False, root: Path | None = None, **context: Any
) -> str:
    """Render a page, such as ``report/page.html.j2``.

    Parameters
    ----------
    data
        Plain values for the script, which reads them by ``JSON.parse(document.getElementById("data").textContent)``.
        Not-a-number and infinity are a ValueError.
    polls
        Whether the script may request data from the server of the page; no other page may request anything.
    root
        Folder to which absolute paths below it are relative in the page.
    context
        Names in the template. A name that the template uses and that is not given is an error.
    """
    name = template_name.removesuffix(ENDING)
    script = _own_files(name, "js")
    return (
        _environment()
        .get_template(template_name)
        .render(
            **context,
            data=data,
            root=root,
            policy=_policy(script, polls=polls),
            script=Markup(script),
            style=Markup(_own_files("pages/base", "css") + _own_files(name, "css")),
        )
    )


def base64_of(write: Callable[[BinaryIO], object]) -> str:
    """Return what a function writes to a file, such as a picture, in base64."""
    write(stream := io.BytesIO())
    return b64encode(stream.getvalue()).decode()


def hide_paths(text: str, *, root: Path | None = None) -> str:
    """Shorten absolute paths in a text to ``…/NAME``, those below ``root`` to the path from there."""
    if root is not None:
        text = re.sub(f"{_START}{re.escape(str(root))}/", "", text)
    if whole := _WHOLE.fullmatch(text):
        return f"…/{whole[1]}"
    return _PARENTS.sub("…/", _QUOTED.sub(lambda quoted: _INNER_PARENTS.sub("…/", quoted[0]), text))


def _policy(script: str, *, polls: bool) -> Markup:
    """Return the Content-Security-Policy of a page with this script."""
    allowed = f"'sha256-{b64encode(new_identity(script.encode()).digest()).decode()}'" if script else "'none'"
    parts = ["default-src 'none'", "img-src data:", "style-src 'unsafe-inline'", f"script-src {allowed}"]
    return Markup(
        "; ".join([*parts, *(["connect-src 'self'"] if polls else []), "base-uri 'none'; form-action 'none'"])
    )


def _own_files(name: str, kind: str) -> str:
    """Return the text of a style or script, of parts such as ``name.1_map.js``; empty if the template has none."""
    return "".join(file.read_text(encoding="utf-8") for file in sorted(ROOT.glob(f"{name}.*{kind}")))


@pass_context
def _shown(context: Context, value: object) -> object:
    """Return markup as it is; of other values the text that a page shows."""
    return value if isinstance(value, Markup) else hide_paths(sanitize(value), root=context.get("root"))


@cache
def _environment() -> Environment:
    """Return the templates, which escape all text, replace control characters and shorten paths."""
    environment = Environment(
        loader=FileSystemLoader(ROOT),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.globals["repr"] = repr
    return environment
