"""The page in a real browser, on a phone and on a desk, light and dark; skipped where there is no browser.

Images of it are left in ``build/``, for whoever wants to see it.
"""

from pathlib import Path

import pytest

from tests.browser import PROGRAM, Browser
from tests.fedssl.report.test_html_page import HOSTILE, job, page_of
from tests.test_docs import ROOT

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")]

COLUMN = "[...document.querySelectorAll('table')[0].tBodies[0].rows].map(row => row.cells[{}].textContent)"
CLICK = "document.querySelectorAll('table')[0].tHead.rows[0].cells[{}].querySelector('button').click()"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
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
def test_the_page_opens_without_a_complaint_and_fits(browser: Browser, file: Path, width: int, dark: bool):
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(file, width=width, dark=dark)
    assert browser.complaints == []
    assert browser.requests == [file.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll within the page
    ground, ink = browser.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    light = [sum(int(part) for part in color[4:-1].split(",")) for color in (ground, ink)]
    assert (light[0] < light[1]) == dark
    assert browser.evaluate("document.querySelectorAll('svg text').length") > 10
    assert browser.evaluate("document.querySelector('svg').getBoundingClientRect().height") > 100
    image = browser.image()
    assert image.startswith(b"\x89PNG")
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / f"report-{width}-{'dark' if dark else 'light'}.png").write_bytes(image)


def test_a_click_on_a_header_sorts_and_a_second_one_the_other_way_round(browser: Browser, file: Path):
    browser.open(file, width=1280, dark=False)
    names = browser.evaluate("[...document.querySelectorAll('table')[0].tHead.rows[0].cells].map(c => c.textContent)")
    result, rate = names.index("knn (%)"), names.index("lr")
    assert browser.evaluate(COLUMN.format(result)) == ["9.5", "31.0", "20.0", "50.0", "-"]
    browser.evaluate(CLICK.format(result))
    assert browser.evaluate(COLUMN.format(result)) == ["9.5", "20.0", "31.0", "50.0", "-"]
    browser.evaluate(CLICK.format(result))
    assert browser.evaluate(COLUMN.format(result)) == ["50.0", "31.0", "20.0", "9.5", "-"]  # nothing stays last
    browser.evaluate(CLICK.format(rate))
    assert browser.evaluate(COLUMN.format(rate)) == ["1e-3", "0.5", "0.5", "2", "10"]
    sorted_by = "[...document.querySelectorAll('[aria-sort]')].map(c => c.textContent)"
    assert browser.evaluate(sorted_by) == ["lr"]


def test_no_script_but_the_page_s_own_runs(browser: Browser, file: Path, tmp_path: Path):
    changed = tmp_path / "changed.html"
    text = file.read_text()
    changed.write_text(text.replace("<h1>", "<script>document.title = 'changed'</script><img src='https://a.b/c'><h1>"))
    browser.complaints.clear()
    browser.open(changed, width=1280, dark=False)
    assert browser.evaluate("document.title") == "Report of federated runs"
    assert len(browser.complaints) >= 2  # the script and the image were refused
    assert all("Content Security Policy" in one for one in browser.complaints)


def test_the_page_can_be_read_without_script(browser: Browser, file: Path):
    browser("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(file, width=390, dark=False)
    browser("Emulation.setScriptExecutionDisabled", value=False)  # for the test's own questions
    assert browser.evaluate("document.querySelectorAll('button').length") == 0
    names = browser.evaluate("[...document.querySelectorAll('table')[0].tHead.rows[0].cells].map(c => c.innerText)")
    assert "knn (%)" in names
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") > 0
    browser.evaluate("document.querySelector('details:not([open]) summary').click()")
    assert browser.evaluate("document.querySelectorAll('details[open]').length") == 2
