"""The page in Chromium, on a phone and on a desktop, light and dark. Screenshots are written to ``build/``."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fedssl.report.test_html_page import HOSTILE, job, page_of
from tests.test_docs import ROOT

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

ROWS = "[...document.querySelectorAll('table')[0].tBodies[0].rows]"
OpenPage = Callable[..., "Page"]


class Page:
    """The report in a browser window, with its console messages and requests."""

    def __init__(self, browser: "playwright.Browser", file: Path, *, width: int, dark: bool, scripts: bool) -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            java_script_enabled=scripts,
        )
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.evaluate = self.page.evaluate

    @property
    def header(self) -> list[str]:
        return self.page.locator("table").first.locator("th").all_inner_texts()

    def column(self, name: str) -> list[str]:
        return self.evaluate(f"{ROWS}.map(row => row.cells[{self.header.index(name)}].textContent)")

    def sort_by(self, name: str) -> None:
        self.page.locator("table").first.locator("th button").nth(self.header.index(name)).click()


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: "playwright.Browser") -> Iterator[OpenPage]:
    pages: list[Page] = []

    def open_file(file: Path, *, width: int = 1280, dark: bool = False, scripts: bool = True) -> Page:
        pages.append(Page(browser, file, width=width, dark=dark, scripts=scripts))
        return pages[-1]

    yield open_file
    for page in pages:
        page.page.close()


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
    report = open_page(file, width=width, dark=dark)
    assert report.messages == []
    assert report.requests == [file.as_uri()]
    assert report.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll within the page
    ground, ink = report.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    light = [sum(int(part) for part in color[4:-1].split(",")) for color in (ground, ink)]
    assert (light[0] < light[1]) == dark
    assert min(report.evaluate("[...document.images].map(image => image.naturalHeight)")) > 100  # all are displayed
    (ROOT / "build").mkdir(exist_ok=True)
    screenshot = ROOT / "build" / f"report-{width}-{'dark' if dark else 'light'}.png"
    report.page.screenshot(path=screenshot, full_page=True)
    assert screenshot.read_bytes().startswith(b"\x89PNG")


def test_clicks_on_a_header_sort_in_both_directions(open_page: OpenPage, file: Path):
    report = open_page(file)
    assert report.column("knn (%)") == ["9.5", "31.0", "20.0", "50.0", "-"]
    report.sort_by("knn (%)")
    assert report.column("knn (%)") == ["9.5", "20.0", "31.0", "50.0", "-"]
    report.sort_by("knn (%)")
    assert report.column("knn (%)") == ["50.0", "31.0", "20.0", "9.5", "-"]  # missing values stay last
    report.sort_by("lr")
    assert report.column("lr") == ["1e-3", "0.5", "0.5", "2", "10"]
    assert report.evaluate("[...document.querySelectorAll('[aria-sort]')].map(c => c.textContent)") == ["lr"]


def test_only_the_script_of_the_page_runs(open_page: OpenPage, file: Path, tmp_path: Path):
    changed = tmp_path / "changed.html"
    added = "<script>document.title = 'changed'</script><img src='https://a.b/c'><h1>"
    changed.write_text(file.read_text().replace("<h1>", added))
    report = open_page(changed)
    assert report.page.title() == "Report of federated runs"
    assert len(report.messages) >= 2  # the script and the image are blocked
    assert all("Content Security Policy" in message for message in report.messages)


def test_the_page_is_readable_without_scripts(open_page: OpenPage, file: Path):
    report = open_page(file, width=390, scripts=False)
    assert report.page.locator("button").count() == 0
    assert "knn (%)" in report.header
    folded = report.page.locator("details:not([open])")
    count = folded.count()
    assert count > 0
    folded.first.locator("summary").click()
    assert folded.count() == count - 1
