"""HTML pages that need nothing but themselves: Jinja2 templates, one stylesheet, and no access to the network.

A template is named by its path in the package ``fedssl`` and lies in the package of its feature. It extends
``pages/base.html.j2``. Files beside it with its name and the endings ``.css`` and ``.js`` are its own style and script.
Text is escaped. The Content-Security-Policy allows this script alone, by its hash, and images inside the page.
"""

from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedssl.digests import new_identity
from fedssl.safe_io import sanitize

ROOT = Path(__file__).parents[1]
ENDING = ".html.j2"


def render(template_name: str, *, data: Any = None, polls: bool = False, **context: Any) -> str:
    """Render a page, such as ``report/page.html.j2``.

    Parameters
    ----------
    data
        Plain values for the script, which reads them by ``JSON.parse(document.getElementById("data").textContent)``.
        Not-a-number and infinity are a ValueError.
    polls
        Whether the script may request data from the server of the page; no other page may request anything.
    context
        Names in the template. A name that the template uses and that is not given is an error.
    """
    name = template_name.removesuffix(ENDING)
    script = _own_file(f"{name}.js")
    return (
        _environment()
        .get_template(template_name)
        .render(
            **context,
            data=data,
            policy=_policy(script, polls=polls),
            script=Markup(script),
            style=Markup(_own_file("pages/base.css") + _own_file(f"{name}.css")),
        )
    )


def _policy(script: str, *, polls: bool) -> Markup:
    """Return the Content-Security-Policy of a page with this script."""
    allowed = f"'sha256-{b64encode(new_identity(script.encode()).digest()).decode()}'" if script else "'none'"
    parts = ["default-src 'none'", "img-src data:", "style-src 'unsafe-inline'", f"script-src {allowed}"]
    return Markup(
        "; ".join([*parts, *(["connect-src 'self'"] if polls else []), "base-uri 'none'; form-action 'none'"])
    )


def _own_file(name: str) -> str:
    """Return the text of a style or script; empty if the template has none."""
    file = ROOT / name
    return file.read_text(encoding="utf-8") if file.is_file() else ""


@cache
def _environment() -> Environment:
    """Return the templates, which escape all text and replace control characters."""
    environment = Environment(
        loader=FileSystemLoader(ROOT),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else sanitize(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.globals["repr"] = repr
    return environment
