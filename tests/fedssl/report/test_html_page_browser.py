"""The page in Chromium, on a phone and on a desktop, light and dark. Screenshots are written to ``build/``."""

from pathlib import Path

import pytest

from tests.fedssl.pages.browser import OpenPage, Page, check_only_own_script_runs, needs_browser
from tests.fedssl.report.test_html_page import HOSTILE, job, page_of
from tests.test_docs import ROOT

pytestmark = needs_browser

ROWS = "[...document.querySelectorAll('table')[0].tBodies[0].rows]"


def header(report: Page) -> list[str]:
    return report.page.locator("table").first.locator("th").all_inner_texts()


def column(report: Page, name: str) -> list[str]:
    return report.evaluate(f"{ROWS}.map(row => row.cells[{header(report).index(name)}].textContent)")


def sort_by(report: Page, name: str) -> None:
    report.page.locator("table").first.locator("th button").nth(header(report).index(name)).click()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for rate, knn in (("0.5", 0.095), ("1e-3", 0.31), ("10", 0.2)):
        job(folder / rate, "strategy=l_dawa", f"lr={rate}", knn=knn)
    job(folder / "none", "strategy=l_dawa", "lr=2", status="failed", reason=HOSTILE)
    job(folder / "hostile", f"strategy={HOSTILE}", "lr=0.5", knn=0.5)
    file = folder / "report.html"
    file.write_text(page_of(folder))
    return file


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_without_messages_and_fits(open_page: OpenPage, file: Path, width: int, dark: bool):
    report = open_page(file.as_uri(), width=width, dark=dark)
    assert report.messages == []
    assert report.requests == [file.as_uri()]
    report.check_layout()
    assert min(report.evaluate("[...document.images].map(image => image.naturalHeight)")) > 100  # all are displayed
    top = report.evaluate("document.images[0].getBoundingClientRect().top")
    assert top < report.evaluate("document.querySelector('table').getBoundingClientRect().top")
    (ROOT / "build").mkdir(exist_ok=True)
    screenshot = ROOT / "build" / f"report-{width}-{'dark' if dark else 'light'}.png"
    report.page.screenshot(path=screenshot, full_page=True)
    assert screenshot.read_bytes().startswith(b"\x89PNG")


def test_clicks_on_a_header_sort_in_both_directions(open_page: OpenPage, file: Path):
    report = open_page(file.as_uri())
    assert column(report, "knn (%)") == ["9.5", "31.0", "20.0", "50.0", "-"]
    sort_by(report, "knn (%)")
    assert column(report, "knn (%)") == ["9.5", "20.0", "31.0", "50.0", "-"]
    sort_by(report, "knn (%)")
    assert column(report, "knn (%)") == ["50.0", "31.0", "20.0", "9.5", "-"]  # missing values stay last
    sort_by(report, "lr")
    assert column(report, "lr") == ["1e-3", "0.5", "0.5", "2", "10"]
    assert report.evaluate("[...document.querySelectorAll('[aria-sort]')].map(c => c.textContent)") == ["lr"]


def test_only_the_script_of_the_page_runs(open_page: OpenPage, file: Path):
    check_only_own_script_runs(open_page, file, "Report of federated runs")


def test_the_page_is_readable_without_scripts(open_page: OpenPage, file: Path):
    report = open_page(file.as_uri(), width=390, scripts=False)
    assert report.page.locator("button").count() == 0
    assert "knn (%)" in header(report)
    folded = report.page.locator("details:not([open])")
    count = folded.count()
    assert count > 0
    folded.first.locator("summary").click()
    assert folded.count() == count - 1
