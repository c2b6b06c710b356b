"""The page of views in Chromium: its look, its keys, and no request."""

from pathlib import Path

import pytest

from fedssl.augmented_views.cli import run
from tests.fedssl.pages.browser import OpenPage, needs_browser
from tests.test_docs import ROOT

pytestmark = needs_browser


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_the_page_fits_and_shows_all_pictures(open_page: OpenPage, tmp_path: Path, width: int, dark: bool):
    out = tmp_path / "views.html"
    run([f"out={out}", "images=3", "experiment=dino", "augmentation=digits_multi_crop"])
    page = open_page(out.as_uri(), width=width, dark=dark)
    page.check_layout()
    assert page.messages == []
    assert page.requests == [out.as_uri()]
    assert set(page.evaluate("[...document.images].map(image => image.naturalWidth)")) == {4, 8}
    assert set(page.evaluate("[...document.images].map(image => image.width)")) == {64, 128}
    row = page.page.locator(".pictures").first
    row.focus()
    page.page.keyboard.press("End")
    page.page.keyboard.press("ArrowRight")
    page.page.wait_for_timeout(300)
    assert row.evaluate("row => row.scrollLeft > 0 || row.scrollWidth <= row.clientWidth")
    (ROOT / "build").mkdir(exist_ok=True)
    page.page.screenshot(path=ROOT / "build" / f"views-{width}-{'dark' if dark else 'light'}.png", full_page=True)
