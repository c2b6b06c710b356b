"""Pages: escaped text, data of scripts, and the policy."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from fedssl import pages
from fedssl.pages import hide_paths, render

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b&'\""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the base template and a feature with a template, a style and a script."""
    (tmp_path / "feature").mkdir()
    (tmp_path / "pages").mkdir()
    for name in ("base.css", "base.html.j2"):
        (tmp_path / "pages" / name).write_text((pages.ROOT / "pages" / name).read_text())
    text = '{% extends "pages/base.html.j2" %}{% block title %}{{ title }}{% endblock %}'
    (tmp_path / "feature" / "a.html.j2").write_text(text)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    pages._environment.cache_clear()
    yield tmp_path
    pages._environment.cache_clear()


def _policy(page: str) -> dict[str, str]:
    (text,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    return {name: value for name, _, value in (part.partition(" ") for part in text.split("; "))}


def test_text_and_data_cannot_add_elements(own: Path):
    page = render("feature/a.html.j2", title=HOSTILE, data={HOSTILE: [1.5, None, HOSTILE]})
    assert page.count("<script") == page.count("</script>") == 1
    assert "<img" not in page
    assert "\x1b" not in page
    data = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    assert json.loads(data[1]) == {HOSTILE: [1.5, None, HOSTILE]}


def test_a_missing_value_and_a_nan_are_errors(own: Path):
    with pytest.raises(UndefinedError, match="title"):
        render("feature/a.html.j2")
    with pytest.raises(ValueError, match="not JSON compliant"):
        render("feature/a.html.j2", title="a", data=[float("nan")])


def test_a_page_runs_its_own_script_alone_and_requests_nothing(own: Path):
    assert _policy(render("feature/a.html.j2", title="a"))["script-src"] == "'none'"
    script = "document.title = '<b>'"
    (own / "feature" / "a.js").write_text(script)
    (own / "feature" / "a.css").write_text("b > i { color: red }")
    page = render("feature/a.html.j2", title="a")
    assert f"<script>{script}</script>" in page
    assert "b > i { color: red }" in page
    assert _policy(page) == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": "'unsafe-inline'",
        "script-src": f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert _policy(render("feature/a.html.j2", title="a", polls=True))["connect-src"] == "'self'"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/photos", "…/photos"),
        ("/home/Jane Doe/my data/photos", "…/photos"),
        ("/home/me/x.png cannot be read", "…/x.png cannot be read"),
        ("fedssl dataset.path=/home/me/photos/ lr=1", "fedssl dataset.path=…/photos/ lr=1"),
        ("'note=\"/home/a b\"' [/x/y,/z]", "'note=\"…/a b\"' […/y,…/z]"),
        (
            "fedssl 'dataset.path=/home/Jane Doe/my photos' '/a b/c d.csv'",
            "fedssl 'dataset.path=…/my photos' '…/c d.csv'",
        ),
        ("'a=/home/J D/x,/home/J D/y z/' '{/b c/d,/e}'", "'a=…/x,…/y z/' '{…/d,…/e}'"),
        ("/srv/runs/a/0: /srv/runs/a is not /srv/runs2/b", "a/0: a is not …/b"),
        ("/mnt/srv/runs/a", "…/a"),
        ("'hydra.searchpath=[\"file:///home/me/conf\"]'", "'hydra.searchpath=[\"file://…/conf\"]'"),
        ("uri=sqlite:////home/me/x.db", "uri=sqlite:///…/x.db"),
        2 * ("sqlite:///runs/x.db, s3://a/b/c",),
        2 * ("https://a.b/c/d, and/or, 1 / 2, runs/a, </svg>, ../a",),
    ],
)
def test_absolute_paths_are_shortened(text: str, shown: str):
    assert hide_paths(text, root=Path("/srv/runs")) == shown


def test_colors_of_the_stylesheet_have_the_contrast_of_wcag_aa():
    """Text needs a ratio of 4.5 to its ground; (L1 + 0.05) / (L2 + 0.05), L being the relative luminance."""
    style = (pages.ROOT / "pages" / "base.css").read_text()
    themes = [dict(re.findall(r"--(\w+): #(\w{6});", part)) for part in style.split("@media (prefers-color-scheme")[:2]]
    assert all(len(theme) == 6 for theme in themes)

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for theme in themes:
        for text in ("ink", "faint", "link"):
            for ground in ("ground", "band"):
                light, dark = sorted((luminance(theme[text]), luminance(theme[ground])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
