"""The page in Chromium: mouse, touch and keys, phone and desktop, light and dark. Screenshots are in ``build/``."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from fedssl.explore.columns import column_of
from fedssl.pages import ROOT as PACKAGE
from fedssl.text_table import csv_cell, csv_path
from tests.fedssl.explore.test_page import HOSTILE, HOSTILE_LABEL, page_of
from tests.fedssl.pages.browser import OpenPage, Page, check_only_own_script_runs, needs_browser
from tests.test_docs import ROOT

pytestmark = needs_browser


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("explore") / "page.html"
    file.write_text(page_of(150))
    return file


@pytest.fixture
def page(open_page: OpenPage, file: Path) -> Page:
    return open_page(file.as_uri())


def place_of(page: Page, row: int) -> tuple[float, float]:
    left, top = page.evaluate("(({ x, y }) => [x + map.clientLeft, y + map.clientTop])(map.getBoundingClientRect())")
    x, y = page.evaluate(f"[screenX({row}), screenY({row})]")
    return left + x, top + y


def text(page: Page, name: str) -> str:
    return page.page.locator(f"#{name}").inner_text()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_without_requests_and_fits(open_page: OpenPage, file: Path, width: int, dark: bool):
    page = open_page(file.as_uri(), width=width, dark=dark)
    page.wait_until("sheets.every(Boolean)")
    page.evaluate("setCurrent(5)")
    assert page.messages == []
    assert page.requests == [file.as_uri()]
    page.check_layout()
    assert page.evaluate("document.images.length") == 0  # the hostile name is text
    assert HOSTILE in page.page.locator("#gallery .tile").first.get_attribute("aria-label")
    assert HOSTILE_LABEL in text(page, "legend")
    (ROOT / "build").mkdir(exist_ok=True)
    page.page.wait_for_timeout(100)
    page.page.screenshot(path=ROOT / "build" / f"explore-{width}-{'dark' if dark else 'light'}.png", full_page=True)


def luminance(color: str) -> float:
    """Compute the relative luminance of ``#rrggbb`` by WCAG 2."""
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_colors_have_the_contrast_of_graphics(open_page: OpenPage, file: Path, dark: bool):
    page = open_page(file.as_uri(), dark=dark)
    ground = luminance(page.evaluate("theme.ground.trim()"))
    colors = [luminance(color) for color in page.evaluate("[...PALETTE, OTHER]")]
    ratios = [(max(color, ground) + 0.05) / (min(color, ground) + 0.05) for color in colors]
    assert min(ratios) >= 3
    assert len(ratios) == 12


def test_a_click_on_the_map_selects_its_image(page: Page):
    page.page.locator("#thumbs").uncheck()
    nearest = page.evaluate("rowAt(screenX(7), screenY(7))")
    page.page.mouse.click(*place_of(page, 7))
    assert page.evaluate("current") == nearest
    assert page.page.locator(".name").inner_text() == page.evaluate(f"names[{nearest}]")
    tiles = page.page.locator("#details .tile")
    assert tiles.count() == 10
    captions = [float(caption) for caption in tiles.all_inner_texts()]
    assert captions == sorted(captions, reverse=True)
    tiles.nth(3).click()
    assert page.evaluate("current") == page.evaluate(f"neighbors[{nearest * 10 + 3}]")


def test_drag_wheel_and_buttons_move_the_map(page: Page):
    x, y = place_of(page, 7)
    page.page.mouse.move(x, y)
    page.page.mouse.wheel(0, -500)
    page.wait_until("camera.scale > 2")
    assert place_of(page, 7) == pytest.approx((x, y), abs=2)  # the point below the mouse stays
    page.page.mouse.down()
    page.page.mouse.move(x + 50, y + 20, steps=3)
    page.page.mouse.up()
    assert place_of(page, 7) == pytest.approx((x + 50, y + 20), abs=2)
    assert page.evaluate("current") == -1  # a drag is no click
    page.page.locator("#zoom-all").click()
    assert page.evaluate("[camera.x, camera.y, camera.scale]") == [0, 0, 1]


def test_keys_reach_every_function(page: Page):
    page.page.locator("#map").focus()
    assert page.evaluate("getComputedStyle(map).outlineStyle") == "solid"
    page.page.keyboard.press("ArrowRight")
    assert page.evaluate("current") == 0
    first = page.evaluate("[...names.keys()].sort((one, other) => points[2 * one] - points[2 * other])[10]")
    page.evaluate(f"setCurrent({first})")
    page.page.keyboard.press("ArrowRight")
    second = page.evaluate("current")
    assert page.evaluate(f"screenX({second}) > screenX({first})")
    page.page.keyboard.press("Space")
    assert text(page, "selected") == "1 selected"
    assert ", selected" in page.page.locator("#status").text_content()
    page.page.keyboard.press("+")
    assert page.evaluate("camera.scale") > 1
    page.page.keyboard.press("Escape")
    assert page.evaluate("current") == -1
    tile = page.page.locator("#gallery .tile").first
    tile.focus()
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("Enter")
    assert page.evaluate("current") == 1
    page.page.keyboard.press("s")
    assert text(page, "selected") == "2 selected"
    page.page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.row") == "2"


def test_the_selection_is_downloaded_as_csv(page: Page, tmp_path: Path):
    page.page.locator("#search").fill("folder/1")
    page.page.locator("#add").click()
    page.evaluate("toggle(0)")
    with page.page.expect_download() as download:
        page.page.locator("#download").click()
    download.value.save_as(tmp_path / "selection.csv")
    with (tmp_path / "selection.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["name"] for row in rows] == [
        HOSTILE,
        "folder/1.png",
        *(f"folder/{n}.png" for n in range(10, 20)),
        *(f"folder/{n}.png" for n in range(100, 150)),
    ]
    assert rows[0]["'=site"] == "'=1+0"  # a spreadsheet computes no formula
    assert {row["label"] for row in rows} == {"", "cat", "dog", HOSTILE_LABEL}
    assert float(rows[0]["distance_to_neighbors"]) == pytest.approx(page.evaluate("unusual[0]"), rel=1e-5)
    assert page.messages == []


def test_cells_of_the_selection_are_those_of_other_tables(page: Page):
    texts = ["-1.5", "+2e3", ".5", "-1+2", "--", "- @", "a-b", " =1", "\u200b=1", "\t@a", "a\tb", "=1", ""]
    assert page.evaluate(f"{json.dumps(texts)}.map(safeText)") == [csv_cell(text) for text in texts]
    assert page.evaluate(f"{json.dumps(texts)}.map(safePath)") == [csv_path(text) for text in texts]


def test_search_and_legend_restrict_all_views(page: Page):
    page.page.locator("#search").fill("CAT folder/1")
    count = page.evaluate("shown.reduce((one, other) => one + other)")
    assert 0 < count < 20
    assert text(page, "found") == f"{count} of 150 images"
    assert page.page.locator("#gallery .tile").count() == count
    page.page.locator("#search").fill("no such image")
    assert text(page, "found") == "0 of 150 images"
    page.page.locator("#search").fill("")
    page.page.locator("#legend button", has_text="dog").click()
    dogs = page.evaluate("shown.reduce((one, other) => one + other)")
    assert text(page, "found") == f"{dogs} of 150 images"
    page.page.locator("#color").select_option("cluster")
    assert text(page, "found") == "150 of 150 images"
    assert page.page.locator("#legend button").count() == 3


def test_a_column_may_have_the_title_of_a_computed_one(open_page: OpenPage, tmp_path: Path):
    file = tmp_path / "page.html"
    file.write_text(page_of(30, columns=[column_of("cluster", ["own"] * 30)]))
    page = open_page(file.as_uri())
    assert text(page, "legend") == "own (30)"
    page.page.locator("[data-view=clusters]").click()
    assert page.page.locator("#gallery h3").first.inner_text() == "Cluster 1: 11 images, the most typical"
    page.page.locator("#color").select_option(index=1)
    assert page.page.locator("#legend button").count() == 3


def test_a_box_selects_the_images_in_it(page: Page):
    page.page.locator("#boxed").click()
    left, top = page.evaluate("(({ x, y }) => [x, y])(map.getBoundingClientRect())")
    page.page.mouse.move(left + 2, top + 2)
    page.page.mouse.down()
    page.page.mouse.move(left + 400, top + 500, steps=3)
    page.page.mouse.up()
    expected = page.evaluate(
        "[...names.keys()].filter((row) => Math.abs(screenX(row) - 201) <= 199 && Math.abs(screenY(row) - 251) <= 249)"
    )
    assert sorted(page.evaluate("[...selection]")) == expected
    assert 0 < len(expected) < 150


def test_views_list_clusters_duplicates_and_outliers(page: Page):
    page.page.locator("[data-view=clusters]").click()
    titles = page.page.locator("#gallery h3").all_inner_texts()
    assert titles[:2] == ["Cluster 1: 51 images, the most typical", "Cluster 1, the least typical"]
    first = page.page.locator("#gallery .tiles").first.locator(".tile").first
    row = int(first.get_attribute("data-row"))
    assert page.evaluate(f"distances[{row}]") == pytest.approx(
        page.evaluate("Math.min(...[...distances].filter((_, row) => clusters.codes[row] === 0))")
    )
    page.page.locator("[data-view=duplicates]").click()
    assert page.page.locator("#gallery h3").first.inner_text() == "Equal pixels: 2 images"
    page.page.locator("[data-view=outliers]").click()
    rows = page.evaluate("[...document.querySelectorAll('#gallery .tile')].map((tile) => Number(tile.dataset.row))")
    values = page.evaluate(f"{rows}.map((row) => unusual[row])")
    assert values == sorted(values, reverse=True)
    page.page.locator("#next").click()
    assert text(page, "place") == "Page 2 of 3"


def test_thumbnails_are_those_of_their_images(page: Page):
    page.wait_until("sheets.every(Boolean)")
    page.page.locator("[data-view=outliers]").click()
    page.page.locator("#search").fill("folder/77.png")
    found = page.evaluate("""async () => {
      const canvas = document.querySelector("#gallery .tile canvas");
      await Promise.all(waiting);
      return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
    }""")
    pixels = np.random.default_rng(0)
    pixels.normal(size=(150, 8))
    image = pixels.integers(256, size=(150, 3, 8, 8), dtype=np.uint8)[77]
    shown = np.array(found).reshape(128, 128, 4)[8::16, 8::16, :3].transpose(2, 0, 1)
    assert np.corrcoef(shown[1].ravel(), image[1].ravel())[0, 1] > 0.7


def test_only_the_script_of_the_page_runs(open_page: OpenPage, file: Path):
    check_only_own_script_runs(open_page, file, "Images of photos")


def test_ten_thousand_images_pan_smoothly(open_page: OpenPage, tmp_path: Path):
    file = tmp_path / "many.html"
    file.write_text(page_of(10_000, clusters=5))
    assert file.stat().st_size < 30e6
    page = open_page(file.as_uri())
    page.wait_until("sheets.every(Boolean)")
    milliseconds = page.evaluate("""() => {
      const times = [];
      for (let frame = 0; frame < 31; frame++) {
        camera.x += 0.002;
        const start = performance.now();
        draw();
        times.push(performance.now() - start);
      }
      return times.sort((one, other) => one - other)[15];
    }""")
    assert milliseconds < 100  # 15 on two cores without a GPU; a busy machine needs more
    page.page.locator("#search").fill("folder/99")
    assert text(page, "found") == "111 of 10,000 images"  # 99, 990 to 999, 9900 to 9999


def test_the_page_states_itself_without_scripts(open_page: OpenPage, file: Path):
    page = open_page(file.as_uri(), scripts=False)
    assert "150 images, by the features of my-run" in page.page.locator("main").inner_text()
    assert "need JavaScript" in page.page.locator("main").inner_text()


def test_the_script_sets_no_markup():
    script = "".join(part.read_text() for part in (PACKAGE / "explore").glob("*.js"))
    assert "function setCurrent" in script
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|XMLHttp|import\(", script)
