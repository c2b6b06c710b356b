"""The page of run folders: its parts, hostile text, and no external resources."""

import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from fedssl.pages import ROOT
from fedssl.report.accuracy_table import run_results
from fedssl.report.html_page import encoder_table, page
from fedssl.runs.run import find_runs
from tests.runs import change_summary, write_lines, write_run

HOSTILE = "</svg></td><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m&amp;\"'"
VOID = {"meta", "br", "img"}
SVG = "data:image/svg+xml;base64,"


def job(folder: Path, *words: str, status: str = "finished", reason: str | None = None, knn: float = 0.5) -> Path:
    """A run of two rounds with four images at two clients."""
    write_run(folder, words, status=status, reason=reason, final={"federated": {"knn": knn}})
    given = dict(word.partition("=")[::2] for word in words)
    settings = {"rounds": 2, "seed": int(given.get("seed", 0)), "optimizer": {"lr": float(given.get("lr", 0.1))}}
    (folder / "config.yaml").write_text(json.dumps({**settings, "run_id": str(folder)}))
    (folder / "choices.yaml").write_text(json.dumps({"strategy": given.get("strategy", "l_dawa")}))
    cost = {"clients": 2, "bytes_down": 8, "bytes_up": 4, "seconds": 1, "cost": {"flops": 10, "peak_memory": 5}}
    lines = [{"round": n, "loss": 1 / n, "evaluation": {"knn": n * knn / 2}, **cost} for n in (1, 2)]
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "partition.csv").write_text("client,examples,0,1\n0,3,1,2\n1,1,1,0\n")
    return folder


class Elements(HTMLParser):
    """All elements with their attributes; every one that opens must close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(folder: Path, **more: Any) -> str:
    runs = find_runs([folder])
    return page(runs, [run_results(runs).table()], **more)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> str:
    """The page of two runs with hostile names, one of which failed with a hostile reason."""
    folder = tmp_path_factory.mktemp("runs")
    name = HOSTILE.replace("/", "")
    job(folder / name, f"strategy={HOSTILE}", "seed=0")
    job(folder / "failed", "strategy=fedavg", f"note={HOSTILE}", status="failed", reason=HOSTILE)
    classes = f'client,examples,0,"{HOSTILE.replace(chr(34), chr(34) * 2)}"\n0,3,1,2\n'
    (folder / name / "partition.csv").write_text(classes)
    return page_of(folder)


def test_words_of_others_are_words(hostile: str):
    elements = Elements(hostile)
    assert [tag for tag, _ in elements.found if tag in ("script", "iframe", "object", "a", "form", "svg")] == ["script"]
    assert not [key for _, attributes in elements.found for key in attributes if key.startswith("on")]
    assert "\x1b" not in hostile
    shown = HOSTILE.replace("\x1b", " ")
    assert sum(shown in words for words in elements.words) >= 3  # strategy, note and reason


def test_the_page_needs_nothing_else(hostile: str):
    elements = Elements(hostile)
    assert not re.search(r"https?://|url\(|@import|[^+/A-Za-z0-9]//[a-z]", hostile)
    loading = {"src", "srcset", "href", "data", "action", "poster", "background"}
    links = [(tag, attributes[key]) for tag, attributes in elements.found for key in loading & attributes.keys()]
    assert links
    assert all(tag == "img" and target.startswith(SVG) for tag, target in links)
    assert not {tag for tag, _ in elements.found} & {"link", "base"}


def test_the_page_allows_its_own_script_alone(hostile: str):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', hostile)
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-")
    assert hostile.count(f"<script>{(ROOT / 'report/page.js').read_text()}</script>") == 1
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_a_page_has_results_costs_figures_differences_and_commands(tmp_path: Path):
    for seed, knn in ((0, 0.80), (1, 0.82)):
        job(tmp_path / f"a{seed}", "strategy=l_dawa", f"seed={seed}", knn=knn)
        job(tmp_path / f"b{seed}", "strategy=fedavg", f"seed={seed}", "lr=0.2", knn=knn - 0.1)
    text = page_of(tmp_path)
    assert text == page_of(tmp_path)  # the same runs give the same page
    words = Elements(text).words
    assert "4 of 4 runs finished, 0 running, 0 ended otherwise" in words
    assert "<strong>81.0 ± 1.4</strong>" in text  # 10 points lead, the deviations are 1.4
    assert text.count("<strong>") == 1
    assert "In all rows: rounds=2." in words
    assert f'data-value="{mean([0.80 - 0.1, 0.82 - 0.1])!r}"' in text  # every digit, by which it is sorted
    assert "fedssl strategy=fedavg seed=1 lr=0.2" in words
    assert words.count("a0: loss and results over the rounds") == 1
    assert "a1: loss and results over the rounds" not in words
    assert text.count("<img") == 1 + 1 + 2  # accuracies; the partition; of each rule the metrics
    assert 'http-equiv="refresh"' not in text
    assert '<meta http-equiv="refresh" content="30">' in page_of(tmp_path, again=30.2)


def test_figures_that_compare_come_first_and_open(tmp_path: Path):
    for seed, alpha in ((0, 0.1), (0, 1.0)):
        for lr in (0.1, 0.2):
            words = (f"partition.alpha={alpha}", f"lr={lr}", f"seed={seed}")
            job(tmp_path / f"{alpha}-{lr}", *words)
            if alpha == 1:
                (tmp_path / f"{alpha}-{lr}" / "partition.csv").write_text("client,examples,0,1\n0,3,2,1\n1,1,0,1\n")
    text = page_of(tmp_path)
    first, _, rest = text.partition("<table>")
    captions = re.findall("<figcaption>(.*)</figcaption>", text)
    assert captions == [*re.findall("<figcaption>(.*)</figcaption>", first)]
    assert captions[0] == "accuracy over rounds, over bytes and over FLOPs of a client"
    assert "final accuracy over two swept settings" in captions
    assert captions[-2:] == ["0.1-0.1: images of each client", "1.0-0.1: images of each client"]  # each one once
    assert "<details" not in first
    assert rest.count("<details>") == 4  # loss and results of each run


def test_a_page_has_no_path_of_the_machine(tmp_path: Path):
    for name in ("a", "sub/b"):
        path = tmp_path / "photos" / name
        job(tmp_path / "runs" / name, f"dataset.path={path}", f"note='{path} x'", f"strategy={name[0]}_dawa")
    job(tmp_path / "runs" / "c", status="failed", reason=f"{tmp_path / 'photos'}/x.png: damaged ({tmp_path}/x)")
    text = page_of(tmp_path / "runs")
    words = " ".join(Elements(text).words)
    svgs = [b64decode(data).decode() for data in re.findall(f'{re.escape(SVG)}([^"]*)', text)]
    assert svgs
    for shown in (text, *svgs):
        assert str(tmp_path) not in shown
        assert "/tmp" not in shown
    assert "fedssl dataset.path=…/b" in words
    assert "sub/b: loss and results" in words  # below the folder that holds all runs
    assert "…/x.png: damaged (…/x)" in words


def test_encoders_are_compared_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedssl.report.html_page.svg", lambda figure: "")  # drawn in other tests
    finals = {
        "a0": {"untrained": {"knn": 0.2}, "federated": {"knn": 0.5, "loss": 2.0}, "pixels": {"knn": 0.3}},
        "a1": {"untrained": {"knn": 0.4}, "federated": {"knn": 0.7, "loss": 4.0}, "pixels": {"knn": 0.3}},
        "b0": {"federated": {"knn": 0.6}},
    }
    for name, final in finals.items():
        folder = job(tmp_path / name, f"strategy={'l_dawa' if name[0] == 'a' else 'eua'}", f"seed={name[1]}")
        change_summary(folder, final=final, units={"loss": ""})
    job(tmp_path / "failed", "strategy=fedavg", status="failed")
    data = encoder_table(find_runs([tmp_path]))
    assert list(data.header) == ["strategy", "encoder", "knn (%)", "loss"]
    # Standard deviations of two numbers are their difference divided by the root of 2.
    assert [[cell.text for cell in row] for row in data.rows] == [
        ["l_dawa", "untrained", "30.0 ± 14.1", "-"],
        ["l_dawa", "federated", "60.0 ± 14.1", "3 ± 1.414"],
        ["l_dawa", "pixels", "30.0 ± 0.0", "-"],
        ["eua", "untrained", "-", "-"],
        ["eua", "federated", "60.0", "-"],
        ["eua", "pixels", "-", "-"],
    ]
    assert "<h2>Encoders under the same protocols</h2>" in page_of(tmp_path)
    assert encoder_table(find_runs([tmp_path / "b0"])).rows == []
    assert "Encoders under" not in page_of(tmp_path / "b0")
