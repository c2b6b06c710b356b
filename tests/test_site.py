"""The documentation as a site."""

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.test_docs import ROOT

pytest.importorskip("material", reason="the group docs is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error."""
    place = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")  # what it says about its own future
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(place), strict=True))
    return place


def text(page: Path) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page.read_text()).split())


def test_every_choice_has_a_page_with_its_settings_its_equations_and_an_example(site: Path) -> None:
    page = text(site / "settings/strategy/l_dawa.html")
    assert "fedssl strategy=l_dawa" in page
    assert "weighting uniform uniform: 1/K (Eq. 4) | examples: n_k / sum n (Eq. 5)" in page  # of the YAML's comment
    assert "buffers average Running statistics of batch norm. average: their weighted mean" in page  # above it
    assert "Eqs. 2, 4-6" in page  # of the module's docstring
    assert "Layer-wise divergence aware weight aggregation" in page  # of the class's
    choices = {file.relative_to(ROOT / "conf").with_suffix(".html") for file in (ROOT / "conf/method").rglob("*.yaml")}
    assert all((site / "settings" / choice).exists() for choice in choices)
    assert "method.projector" not in page
    assert "projector.hidden_dim 512" in text(site / "settings/method/simclr.html")  # a setting in a setting


@pytest.mark.parametrize("group", ["strategy", "method", "regularizer", "partition", "evaluation"])
def test_choices_have_their_equations_symbols_and_an_example(site: Path, group: str) -> None:
    for file in (ROOT / "conf" / group).rglob("*.yaml"):
        name = file.relative_to(ROOT / "conf" / group).with_suffix("").as_posix()
        page = (site / "settings" / group / f"{name}.html").read_text()
        if name != "none":
            assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">' in page, name
            shown = text(site / "settings" / group / f"{name}.html")
            assert "symbol meaning here" in shown, name
            assert "$" not in re.sub(r"<pre.*?</pre>|<code.*?</code>|<script.*?</script>", "", page, flags=re.DOTALL), (
                name
            )


def test_pages_link_to_the_texts_that_comments_name(site: Path) -> None:
    assert 'href="../../l_dawa.html"' in (site / "settings/strategy/l_dawa.html").read_text()


def test_parameters_that_share_a_text_have_their_own_defaults(site: Path) -> None:
    page = text(site / "settings/regularizer/fur.html")
    assert "tau_a ( float , default: 0.8 )" in page  # not that of cost_scale, the first of those that share a text


def test_modules_have_pages_and_the_readme_is_the_first(site: Path) -> None:
    assert "load_encoder" in text(site / "modules/fedssl.export.encoder_file.html")
    first = (site / "index.html").read_text()
    assert 'href="train.html"' in first
    assert 'href="docs/' not in first


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in (
        site / "index.html",
        site / "settings/strategy/l_dawa.html",
        site / "modules/fedssl.export.encoder_file.html",
    ):
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded
