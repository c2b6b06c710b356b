"""The documentation as a site."""

import json
import logging
import re
from pathlib import Path

import pytest
from filelock import FileLock

from tests.test_docs import ROOT

MISSING = "the site's tools are not installed: uv sync --group pages"
griffe = pytest.importorskip("griffe", reason=MISSING)
build = pytest.importorskip("mkdocs.commands.build", reason=MISSING).build
load_config = pytest.importorskip("mkdocs.config", reason=MISSING).load_config

SEARCH = "search/search_index.json"

pytest.importorskip("material", reason="the group docs is not installed")


PACKAGES = ("fedssl", "strategies", "client_app", "server_app", "simulation")
UNTESTED = ("_site/", "modules/*", "!modules/fedssl.export.encoder_file.md", "!modules/fedssl.export.preprocess.md")
UNTESTED += ("!modules/fedssl.regularizers.fur.md",)
UNTESTED += tuple(f"settings/{group}/**" for group in ("augmentation", "dataset", "experiment", "optimizer"))
WITH_EQUATIONS = ("strategy", "method", "regularizer", "partition", "evaluation", "schedule")
WITH_EQUATIONS += ("privacy", "calibration", "secure_aggregation")
EQUATION = '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">'


def build_site(folder: Path, **config: str) -> Path:
    """Build the site, with every warning an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")  # a warning about mkdocs itself
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True, **config))
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The site without most of its generated pages, which the first of the workers builds."""
    root = tmp_path_factory.getbasetemp()
    shared = root if worker_id == "master" else root.parent  # of a worker, or of all
    with FileLock(shared / "site.lock"):
        if not (shared / "site").exists():
            built = build_site(shared / "site.partial", exclude_docs="\n".join(UNTESTED))
            built.rename(shared / "site")
    return shared / "site"


@pytest.mark.heavy
def test_the_whole_site_builds_without_a_warning(tmp_path: Path) -> None:
    site = build_site(tmp_path)
    assert (site / "modules/fedssl.training.html").exists()
    assert (site / "settings/experiment").is_dir()


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_parsed_without_a_warning(package: str, caplog: pytest.LogCaptureFixture) -> None:
    def parse(member: griffe.Object) -> None:
        if member.docstring:
            member.docstring.parse("numpy")
        for child in member.members.values():
            if not child.is_alias:
                parse(child)

    parse(griffe.GriffeLoader(search_paths=[ROOT]).load(package))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def text(page: Path) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page.read_text()).split())


def test_every_choice_has_a_page_with_settings_and_an_example(site: Path) -> None:
    page = text(site / "settings/strategy/l_dawa.html")
    assert "fedssl strategy=l_dawa" in page
    assert "weighting uniform uniform: 1/K (Eq. 4) | examples: n_k / sum n (Eq. 5)" in page  # comment of the YAML file
    assert (
        "buffers average Running statistics of batch norm. average: their weighted mean" in page
    )  # comment above a setting
    assert "Eqs. 2, 4-6" in page  # docstring of the module
    assert "Layer-wise divergence aware weight aggregation" in page  # docstring of the class
    choices = {file.relative_to(ROOT / "conf").with_suffix(".html") for file in (ROOT / "conf/method").rglob("*.yaml")}
    assert all((site / "settings" / choice).exists() for choice in choices)
    assert "method.projector" not in page
    assert "projector.hidden_dim 512" in text(site / "settings/method/simclr.html")  # nested setting


@pytest.mark.parametrize(
    "group",
    [
        "strategy",
        "method",
        "regularizer",
        "partition",
        "evaluation",
        "schedule",
        "privacy",
        "calibration",
        "secure_aggregation",
    ],
)
def test_choices_show_the_equations_of_their_docstrings(site: Path, group: str) -> None:
    for file in (ROOT / "conf" / group).rglob("*.yaml"):
        name = file.relative_to(ROOT / "conf" / group).with_suffix("").as_posix()
        page = (site / "settings" / group / f"{name}.html").read_text()
        if name != "none" and "CombinedProtocol" not in page:  # which has those of its protocols
            assert EQUATION in page, name
            assert "$" not in re.sub(r"<pre.*?</pre>|<code.*?</code>|<script.*?</script>", "", page, flags=re.DOTALL), (
                name
            )


@pytest.mark.heavy
def test_strategies_are_listed_with_what_they_exchange(site: Path) -> None:
    page = text(site / "settings/strategy.html")
    sent = "encoder, projector encoder, projector num-examples train-loss , seconds nothing"
    assert f"fedavg , fednova , fedprox {sent}" in page
    for file in (ROOT / "conf/strategy").glob("*.yaml"):
        assert page.count(f" {file.stem} ") >= 2, file


def test_settings_are_listed_with_their_ranges(site: Path) -> None:
    page = text(site / "settings.html")
    assert "num_clients an integer of at least 1 10" in page
    assert "strategy.weighting examples or uniform" in page


def test_results_of_the_benchmark_are_a_page(site: Path) -> None:
    assert "fedavg 44.4 (44.2-45.1)" in text(site / "results.html")


def test_pages_link_to_the_texts_that_comments_name(site: Path) -> None:
    assert 'href="../../strategies.html"' in (site / "settings/strategy/l_dawa.html").read_text()


def test_parameters_that_share_a_text_have_their_own_defaults(site: Path) -> None:
    page = text(site / "modules/fedssl.regularizers.fur.html")
    assert "tau_a ( float , default: 0.8 )" in page  # not that of cost_scale, the first parameter with the same text


def test_modules_have_pages_and_the_readme_is_the_first(site: Path) -> None:
    assert "load_encoder" in text(site / "modules/fedssl.export.encoder_file.html")
    first = (site / "index.html").read_text()
    assert 'href="train.html"' in first
    assert 'href="docs/' not in first
    assert 'href="settings.html"' in first  # conf/


def test_every_page_is_in_the_navigation(site: Path) -> None:
    first = (site / "index.html").read_text()
    for file in (ROOT / "docs").glob("*.md"):
        assert re.search(rf'<a href="{file.stem}.html" class="md-nav__link', first), file
    found = {entry["location"].partition("#")[0] for entry in json.loads((site / SEARCH).read_text())["docs"]}
    assert {"train.html", "settings/strategy/l_dawa.html"} <= found
    assert not any(page.startswith("modules/") for page in found)


def test_code_in_tables_has_no_escaped_bars(site: Path) -> None:
    pages = [file.read_text() for file in site.glob("*.html")]
    assert not any(r"\|" in code for page in pages for code in re.findall(r"<code>(.*?)</code>", page))
    assert "evaluation=l_dawa/linear|fedu/linear" in (site / "papers.html").read_text()


def test_comments_describe_the_fields_of_a_class(site: Path) -> None:
    page = text(site / "modules/fedssl.export.preprocess.html")
    assert "height and width in pixels" in page  # behind size of Preprocess


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in ("index", "settings/strategy/l_dawa", "modules/fedssl.export.encoder_file"):
        loaded = re.findall(
            r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(https?:[^"]+)"', (site / f"{page}.html").read_text()
        )
        assert not loaded
