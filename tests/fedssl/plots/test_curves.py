"""Curves from hand-made lines of a run folder."""

import errno
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedssl.errors import InputError
from fedssl.evaluation.collapse_metrics import gaussian_spectrum
from fedssl.plots.registry import write_plot
from tests.runs import write_lines


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is drawn: points by the label of their line, edges of the band."""
    calls: dict[str, Any] = {}
    plot, band = Axes.plot, Axes.fill_between

    def note_plot(axes: Axes, *data: Any, **style: Any) -> Any:
        calls[style["label"]] = [tuple(map(float, point)) for point in zip(*data, strict=True)]
        return plot(axes, *data, **style)

    def note_band(axes: Axes, x: Any, low: Any, high: Any, **style: Any) -> Any:
        calls["band"] = np.stack([low, high], axis=1).tolist()
        return band(axes, x, low, high, **style)

    monkeypatch.setattr(Axes, "plot", note_plot)
    monkeypatch.setattr(Axes, "fill_between", note_band)
    return calls


def is_png(file: Path | None) -> bool:
    return file is not None and file.read_bytes().startswith(b"\x89PNG")


def test_plot_metrics(tmp_path: Path, drawn: dict[str, Any]):
    few = {"linear_2_per_class": 0.5, "linear_2_per_class_std": 0.1}
    write_lines(
        tmp_path / "metrics.jsonl",
        [
            {"round": 1, "loss": 4.0, "model_cosine": 0.9},
            {"round": 2, "loss": None, "model_cosine": 0.9, "evaluation": {"knn": 0.6, **few}},
            {"round": 3, "loss": 3.0, "model_cosine": 0.9},
            {"round": 4, "loss": 2.0, "model_cosine": 0.9, "evaluation": {"knn": 0.7}},
        ],
    )
    file = write_plot("metrics", tmp_path, tmp_path)
    assert file == tmp_path / "figures" / "metrics.png"
    assert is_png(file)
    assert drawn == {"loss": [(1, 4), (3, 3), (4, 2)], "knn": [(2, 0.6), (4, 0.7)], "linear_2_per_class": [(2, 0.5)]}


def of_client(round: int, client: int, model: float | None, layers: float | None, **cosine: float) -> dict[str, Any]:
    return {"round": round, "client": client, "cosine": cosine, "model_cosine": model, "layer_cosine": layers}


def test_plot_cosines(tmp_path: Path, drawn: dict[str, Any]):
    # Round 1: the clients' models have 0.99 and 0.97: mean 0.98,
    # sample standard deviation 0.01 sqrt(2). Round 2: one client, and one
    # of which no weights travelled.
    lines = [of_client(1, 0, 0.99, 0.8, a=0.9, b=0.7), of_client(1, 3, 0.97, 0.6, a=0.6, b=0.6)]
    lines += [of_client(2, 1, 0.95, 0.75, a=1.0, b=0.5), of_client(2, 2, None, None)]
    write_lines(tmp_path / "clients.jsonl", lines)
    file = write_plot("cosines", tmp_path, tmp_path)
    assert file == tmp_path / "figures" / "cosines.png"
    assert is_png(file)
    np.testing.assert_allclose(drawn["all weights as one vector, mean over clients"], [(1, 0.98), (2, 0.95)])
    spread = 0.01 * np.sqrt(2)
    np.testing.assert_allclose(drawn["band"], [[0.98 - spread, 0.98 + spread], [np.nan, np.nan]])
    np.testing.assert_allclose(drawn["mean over layers by size"], [(1, 0.7), (2, 0.75)])
    np.testing.assert_allclose(drawn["_a"], [(1, 0.75), (2, 1.0)])  # layers: the mean over clients
    np.testing.assert_allclose(drawn["_b"], [(1, 0.65), (2, 0.5)])


def test_lines_without_cosines_of_layers_are_refused(tmp_path: Path):
    line = of_client(1, 0, 0.99, 0.8, a=0.9)
    del line["layer_cosine"]
    write_lines(tmp_path / "clients.jsonl", [line])
    with pytest.raises(InputError, match="line 1 has no layer_cosine"):
        write_plot("cosines", tmp_path, tmp_path)


def spectrum_of(*values: float) -> dict[str, Any]:
    return {"spectrum": {"singular_values": values, "split": "test", "images": 8, "dim": 4}}


def test_plot_spectra(tmp_path: Path, drawn: dict[str, Any]):
    lines = [
        {"round": 1, "client": None, "model": "global", **spectrum_of(5.0, 5.0)},
        {"round": 4, "client": None, "model": "global", **spectrum_of(100.0, 1.0, 0.0)},
        {"round": 4, "client": 2, **spectrum_of(10.0, 0.1, 0.01)},
    ]
    write_lines(tmp_path / "health.jsonl", lines)
    file = write_plot("spectrum", tmp_path, tmp_path)
    assert file == tmp_path / "figures" / "spectrum.png"
    assert is_png(file)
    reference = np.log10(gaussian_spectrum(8, 4).numpy())
    np.testing.assert_allclose(drawn.pop("Gaussian vectors"), reference[:, None])
    assert drawn == {"global model, round 4": [(2,), (0,), (-12,)], "clients": [(1,), (-1,), (-2,)]}


@pytest.mark.parametrize(("code", "remedy"), [(errno.ENOSPC, "free disk space$"), (errno.EACCES, "make its folder wr")])
def test_a_figure_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch, code, remedy):
    write_lines(tmp_path / "metrics.jsonl", [{"round": 1, "loss": 2.0}])
    file = write_plot("metrics", tmp_path, tmp_path)
    before = file.read_bytes()

    def cut(figure: Figure, stream: BinaryIO, **style: Any) -> None:
        stream.write(b"half")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Figure, "savefig", cut)
    with pytest.raises(InputError, match=f"metrics.png cannot be written .*; {remedy}"):
        write_plot("metrics", tmp_path, tmp_path)
    assert file.read_bytes() == before
    assert [one.name for one in (tmp_path / "figures").iterdir()] == ["metrics.png"]
