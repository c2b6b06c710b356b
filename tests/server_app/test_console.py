"""What standard output shows of a run: the same lines with and without a bar, and when there is one."""

import io
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from fedssl.evaluation.scores import Score
from server_app.console import IS_ROUND, PlainConsole, ProgressBar, ProgressSnapshot, log, log_to, make_screen

LINE = "round 1/2  [red]x[/red] :smile:  " + "long " * 40 + "end"
QUICK = ["num_clients=2", "rounds=2", "local_epochs=0", "dataset.limit=24", "encoder.width=2", "threads=1"]
QUICK += ["partition=iid", "evaluate_every=0", "final_evaluation=none", "measure_resources=false"]


def snapshot(round, **evaluation):
    line = {"round": round, "loss": 4.81, "model_cosine": 0.9, "dropped": {}}
    return ProgressSnapshot(line=line, evaluation=evaluation, rounds=200, seconds_per_round=14.2)


def shown(screen, folder):
    """Log a line, and show the standing after it, with this screen."""
    with log_to(folder, screen):
        screen.open(200)
        log.info(LINE)
        screen.show(snapshot(12, knn=Score(0.6134)))
        log.info("second\nthird")
        screen.show(snapshot(13))
        screen.close()


def on_terminal(text):
    """What is left on a terminal: of every line what was written after it was last erased."""
    text = re.sub(r"\x1b\[\?25[lh]", "", text)
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m|\n|\r|[^\x1b\n\r]+", text):
        if piece == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith("\x1b") and piece != "\r":
            lines[row] += piece
    return "\n".join(lines).rstrip("\n") + "\n"


def without_times(file):
    """Return a log without the time at the beginning of every message."""
    text, count = re.subn(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", file.read_text(), flags=re.MULTILINE)
    assert count
    return text


def test_a_notebook_shows_one_line_that_changes(tmp_path, monkeypatch, capsys):
    shown_objects = []
    handle = SimpleNamespace(update=lambda formats, raw: shown_objects.append(formats))
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    display = SimpleNamespace(display=lambda formats, raw, display_id: shown_objects.append(formats) or handle)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    screen = make_screen(terminal=False)
    with log_to(tmp_path, screen):
        screen.open(200)
        log.info("round 12/200", extra={IS_ROUND: True})
        log.warning("a warning")
        screen.show(snapshot(12, **{"<knn>": Score(0.6134)}))
        screen.show(snapshot(13))
        screen.close()
    assert capsys.readouterr().out == "a warning\n"
    assert "round 12/200" in (tmp_path / "run.log").read_text()
    assert [formats["text/plain"] for formats in shown_objects] == [
        "0/200  preparing",
        "12/200  44 min left  loss 4.810  <knn> 61.3% (round 12)",
        "13/200  44 min left  loss 4.810  <knn> 61.3% (round 12)",
    ]
    assert shown_objects[1]["text/html"] == (
        '<progress value="12" max="200"></progress> 12/200  44 min left  loss 4.810  &lt;knn&gt; 61.3% (round 12)'
    )
    shell.config = {}  # IPython in a terminal
    assert type(make_screen(terminal=False)) is PlainConsole


def test_lines_stay_as_they_are_above_the_bar(tmp_path, monkeypatch):
    stream = io.StringIO()
    shown(ProgressBar(Console(file=stream, force_terminal=True, width=100, color_system=None)), tmp_path)
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stdout", plain)
    shown(PlainConsole(), tmp_path)
    assert plain.getvalue() == f"{LINE}\nsecond\nthird\n"
    assert stream.getvalue() != plain.getvalue()
    assert on_terminal(stream.getvalue()) == plain.getvalue()
    assert without_times(tmp_path / "run.log") == 2 * plain.getvalue()


def test_a_full_disk_of_standard_output_is_not_an_error(tmp_path, monkeypatch, capsys):
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        shown(PlainConsole(), tmp_path)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # which takes what is left
    assert capsys.readouterr().err == ""
    assert without_times(tmp_path / "run.log") == f"{LINE}\nsecond\nthird\n"
