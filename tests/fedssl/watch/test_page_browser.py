"""The live view in Chromium while runs change, and its look."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedssl.watch.cli import WatchServer
from tests.fedssl.pages.browser import OpenPage, needs_browser
from tests.fedssl.report.test_html_page import HOSTILE, job
from tests.fedssl.watch.test_server import serving
from tests.runs import change_summary, write_lines
from tests.test_docs import ROOT

pytestmark = needs_browser


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    with serving(tmp_path / "runs") as server:
        yield server


def address(server: WatchServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}{server.path}"


def test_the_view_follows_runs_without_reloading(open_page: OpenPage, server: WatchServer, tmp_path: Path):
    expect = pytest.importorskip("playwright.sync_api").expect
    view = open_page(address(server))
    status = view.page.locator("#status")
    expect(view.page.locator("#status")).to_contain_text("waiting for a run")
    view.evaluate("window.mark = 1")
    folder = job(tmp_path / "runs" / HOSTILE.replace("/", ""), f"strategy={HOSTILE}")
    view.page.wait_for_selector("#charts figure")
    assert view.page.locator("#run h2").inner_text().startswith("<svg><td><script>alert(1)<script>")
    cosines = {"round": 3, "client": 0, "cosine": {HOSTILE: 0.5}}
    health = {"global": {"effective_rank": 1.2}}
    line = {"round": 3, "clients": 2, "loss": 0.125, "dropped": {"4": HOSTILE}, "health": health}
    write_lines(folder / "clients.jsonl", [cosines])
    write_lines(folder / "metrics.jsonl", [line])
    expect(view.page.locator("#charts")).to_contain_text("loss 0.125")
    expect(view.page.locator("#problems")).to_contain_text("has collapsed in round 3")
    assert "client 4: </svg>" in view.page.locator("#dropped").inner_text()
    assert "⚠" in view.page.locator("#runs tbody tr").inner_text()
    job(tmp_path / "runs" / "second", "strategy=eua", "lr=2")
    view.page.get_by_role("link", name="second").click()
    expect(view.page.locator("#run h2")).to_have_text("second")
    assert view.page.locator("#comparison figure").count() == 1
    shutil.rmtree(tmp_path / "runs" / "second")
    expect(view.page.locator("#facts")).to_contain_text("no longer there")
    assert view.evaluate("window.mark") == 1
    assert view.page.locator("img, iframe, main script").count() == 0
    assert view.messages == []
    assert all(request.startswith(address(server)) for request in view.requests)
    server.shutdown()
    server.server_close()
    expect(view.page.locator("#status")).to_contain_text("trying again")
    assert "No answer from fedssl-watch" in status.inner_text()


def test_a_run_of_one_round_has_one_label(open_page: OpenPage, server: WatchServer, tmp_path: Path):
    folder = job(tmp_path / "runs" / "short")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0])
    view = open_page(f"{address(server)}#%")  # a fragment of somebody else
    view.page.wait_for_selector("figure[data-name=loss]")
    texts = view.page.locator("figure[data-name=loss] svg text").all_text_contents()
    assert [text for text in texts if "round" in text] == ["round 1"]
    assert view.messages == []


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_the_view_fits_and_is_read_by_keys(
    open_page: OpenPage, server: WatchServer, tmp_path: Path, width: int, dark: bool
):
    for name in ("first", "second"):
        folder = job(tmp_path / "runs" / name, f"strategy={name}")
        rows = [(round, client) for round in (1, 2) for client in range(2)]
        cosines = [{"encoder.conv.weight": 0.5 + client / 10, "encoder.bias": 0.9} for _, client in rows]
        lines = [{"round": n, "client": k, "cosine": cosine} for (n, k), cosine in zip(rows, cosines, strict=True)]
        write_lines(folder / "clients.jsonl", lines)
        (folder / "run.log").write_text("2026-01-01 round 1/2 " + "long " * 100)
        write_lines(
            folder / "metrics.jsonl", [{"round": 3, "clients": 1, "health": {"global": {"effective_rank": 1.1}}}]
        )
        values = {"untrained": 0.3, "pixels": 0.4, "federated": 0.5}
        change_summary(folder, final={kind: {"knn": value} for kind, value in values.items()})
    view = open_page(address(server), width=width, dark=dark)
    view.page.wait_for_selector("#charts figure[data-name=layers]")
    view.check_layout()
    accuracy = view.page.locator("figure[data-name='evaluation knn']")
    assert accuracy.locator(".legend").inner_text().split("\n") == ["federated 50", "untrained 30", "pixels 40"]
    accuracy.locator("svg").focus()
    view.page.keyboard.press("ArrowLeft")
    view.page.keyboard.press("ArrowLeft")
    assert "round 1" in accuracy.locator(".legend").inner_text()
    assert "federated 25" in (accuracy.locator("svg").get_attribute("aria-label") or "")
    assert view.messages == []
    (ROOT / "build").mkdir(exist_ok=True)
    view.page.screenshot(path=ROOT / "build" / f"watch-{width}-{'dark' if dark else 'light'}.png", full_page=True)
