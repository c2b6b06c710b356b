"""Fixtures for pages in Chromium, of ``tests/fedssl/conftest.py``; they record messages, requests and contrast."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

OpenPage = Callable[..., "Page"]

# Returns texts with a contrast below that of WCAG AA: 4.5, and 3 from 24 px, or bold from 18.66 px, on.
LOW_CONTRAST = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => color.slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color[3] !== 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getClientRects().length || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const color = element.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const lights = [luminance(parse(color)), luminance(ground(element))].sort((a, b) => b - a);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if ((lights[0] + 0.05) / (lights[1] + 0.05) < (large ? 3 : 4.5)) found.push(element.textContent.slice(0, 40));
  }
  return found;
}"""


class Page:
    """A page in a browser window, with its console messages and requests."""

    def __init__(self, browser: "Browser", address: str, *, width: int, dark: bool, scripts: bool) -> None:
        look = {"viewport": {"width": width, "height": 900}, "color_scheme": "dark" if dark else "light"}
        self.page = browser.new_page(**look, java_script_enabled=scripts)
        self.width, self.dark = width, dark
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def evaluate(self, script: str) -> Any:
        return self.page.evaluate(script)

    def wait_until(self, expression: str) -> None:
        """Wait for an expression to become true; Playwright's own function evaluates text, which the pages block."""
        for _ in range(200):
            if self.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise TimeoutError(expression)

    def check_layout(self) -> None:
        """Check that the page fits its window, is light or dark, and has the contrast of WCAG AA."""
        assert self.evaluate("document.documentElement.scrollWidth") <= self.width  # tables scroll within the page
        ground, ink = self.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
        light = [sum(int(part) for part in color[4:-1].split(",")) for color in (ground, ink)]
        assert (light[0] < light[1]) == self.dark
        assert self.evaluate(LOW_CONTRAST) == []


def check_only_own_script_runs(open_page: OpenPage, file: Path, title: str) -> None:
    """Check that a script and an image that somebody has added to a page are blocked."""
    changed = file.with_stem("changed")
    added = "<script>document.title = 'changed'</script><img src='https://a.b/c'><h1>"
    changed.write_text(file.read_text().replace("<h1>", added))
    page = open_page(changed.as_uri())
    assert page.page.title() == title
    assert len(page.messages) >= 2  # the script and the image
    assert all("Content Security Policy" in message for message in page.messages)


@pytest.fixture(scope="module")  # Playwright has a running event loop, which others may not have
def browser() -> Iterator["Browser"]:
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[OpenPage]:
    pages: list[Page] = []

    def open_address(address: str, *, width: int = 1280, dark: bool = False, scripts: bool = True) -> Page:
        pages.append(Page(browser, address, width=width, dark=dark, scripts=scripts))
        return pages[-1]

    yield open_address
    for page in pages:
        page.page.close()
