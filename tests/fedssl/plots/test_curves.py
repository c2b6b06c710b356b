"""Curves from hand-made lines of a run folder."""

import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedssl.errors import InputError
from fedssl.evaluation.collapse_metrics import gaussian_spectrum
from fedssl.plots.curves import plot_cosines, plot_metrics, plot_spectra
from fedssl.plots.registry import write_final_plots, write_plot


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


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
    assert drawn == {
        "loss": [(1, 4), (3, 3), (4, 2)],
        "knn": [(2, 0.6), (4, 0.7)],
        "linear_2_per_class": [(2, 0.5)],
    }


def test_every_unit_has_a_panel(tmp_path: Path):
    results = {"knn": 0.6, "linear": 0.7, "linear_std": 0.1, "nll": 2.5, "nll_std": 0.5}
    units = {"knn": "accuracy", "linear": "accuracy", "nll": "nats"}
    write_lines(tmp_path / "metrics.jsonl", [{"round": 1, "loss": 4.0, "evaluation": results, "units": units}])
    plotted = plot_metrics(tmp_path)
    assert plotted is not None
    panels = {axes.get_ylabel(): axes.get_legend_handles_labels()[1] for axes in plotted.figure.axes}
    assert panels == {"mean loss of the clients": ["loss"], "accuracy": ["knn", "linear"], "nats": ["nll"]}


def test_plot_metrics_without_losses_or_without_anything(tmp_path: Path, drawn: dict[str, Any]):
    write_lines(tmp_path / "metrics.jsonl", [{"round": 1, "loss": None, "evaluation": {"knn": 0.5}}])
    assert is_png(write_plot("metrics", tmp_path, tmp_path))
    assert list(drawn) == ["knn"]
    other = tmp_path / "other"
    other.mkdir()
    write_lines(other / "metrics.jsonl", [{"round": 1, "loss": None}])
    assert write_plot("metrics", other, other) is None
    assert not (other / "figures").exists()


def of_client(round: int, client: int, model: float | None, layers: float | None, **cosine: float) -> dict[str, Any]:
    return {"round": round, "client": client, "cosine": cosine, "model_cosine": model, "layer_cosine": layers}


def test_plot_cosines(tmp_path: Path, drawn: dict[str, Any]):
    # Round 1: the clients' models have 0.99 and 0.97: mean 0.98, standard deviation 0.01. Round 2: one client, and one
    # of which no weights travelled.
    lines = [of_client(1, 0, 0.99, 0.8, a=0.9, b=0.7), of_client(1, 3, 0.97, 0.6, a=0.6, b=0.6)]
    lines += [of_client(2, 1, 0.95, 0.75, a=1.0, b=0.5), of_client(2, 2, None, None)]
    write_lines(tmp_path / "clients.jsonl", lines)
    file = write_plot("cosines", tmp_path, tmp_path)
    assert file == tmp_path / "figures" / "cosines.png"
    assert is_png(file)
    np.testing.assert_allclose(drawn["all weights as one vector, mean over clients"], [(1, 0.98), (2, 0.95)])
    np.testing.assert_allclose(drawn["band"], [[0.97, 0.99], [0.95, 0.95]])
    np.testing.assert_allclose(drawn["mean over layers by size"], [(1, 0.7), (2, 0.75)])
    np.testing.assert_allclose(drawn["_a"], [(1, 0.75), (2, 1.0)])  # layers: the mean over clients
    np.testing.assert_allclose(drawn["_b"], [(1, 0.65), (2, 0.5)])


def test_layers_that_do_not_travel_in_every_round(tmp_path: Path, drawn: dict[str, Any]):
    lines = [of_client(1, 0, 0.9, 0.8, a=0.9, b=0.7), of_client(2, 0, 1.0, None, b=0.5)]
    lines += [of_client(3, 0, 0.9, 0.6, a=0.8, b=0.4)]
    write_lines(tmp_path / "clients.jsonl", lines)
    write_plot("cosines", tmp_path, tmp_path)
    assert drawn["_a"] == [(1, 0.9), (3, 0.8)]
    assert drawn["_b"] == [(1, 0.7), (2, 0.5), (3, 0.4)]
    assert drawn["mean over layers by size"] == [(1, 0.8), (3, 0.6)]  # b was all zero in round 2


def test_plot_cosines_without_cosines(tmp_path: Path):
    write_lines(tmp_path / "clients.jsonl", [of_client(1, 0, None, None)])
    assert write_plot("cosines", tmp_path, tmp_path) is None


def spectrum_of(values: list[float], *, split: str = "test", images: int = 8, dim: int = 4) -> dict[str, Any]:
    return {"spectrum": {"singular_values": values, "split": split, "images": images, "dim": dim}}


def test_plot_spectra(tmp_path: Path, drawn: dict[str, Any]):
    lines = [
        {"round": 1, "client": None, "model": "global", **spectrum_of([5.0, 5.0])},
        {"round": 4, "client": None, "model": "global", **spectrum_of([100.0, 1.0, 0.0])},
        {"round": 4, "client": 2, **spectrum_of([10.0, 0.1, 0.01])},
    ]
    write_lines(tmp_path / "health.jsonl", lines)
    file = write_plot("spectrum", tmp_path, tmp_path)
    assert file == tmp_path / "figures" / "spectrum.png"
    assert is_png(file)
    reference = np.log10(gaussian_spectrum(8, 4).numpy())
    np.testing.assert_allclose(drawn.pop("Gaussian vectors"), reference[:, None])
    assert drawn == {"global model, round 4": [(2,), (0,), (-12,)], "clients": [(1,), (-1,), (-2,)]}


@pytest.mark.parametrize(
    ("found", "title"),
    [
        ({"images": 8}, "8 test images in 4 dimensions"),
        ({"images": 7}, "7 test images in 4 dimensions, fewer than two for each"),
        ({"split": "federated"}, "8 images of the clients (there are none for the test) in 4 dimensions"),
    ],
)
def test_a_spectrum_says_what_it_is_of(tmp_path: Path, found: dict[str, Any], title: str):
    write_lines(tmp_path / "health.jsonl", [{"round": 1, "client": None, "model": "x", **spectrum_of([1.0], **found)}])
    plotted = plot_spectra(tmp_path)
    assert plotted is not None
    assert plotted.figure.axes[0].get_title() == title


def spectra_of(models: int) -> list[dict[str, Any]]:
    rows = [{"round": 2, "client": None, "model": str(n), **spectrum_of([10.0**n])} for n in range(models)]
    return [*rows, {"round": 2, "client": 3, **spectrum_of([1.0])}]


def test_spectra_of_several_global_models(tmp_path: Path, drawn: dict[str, Any]):
    write_lines(tmp_path / "health.jsonl", spectra_of(3))
    assert is_png(write_plot("spectrum", tmp_path, tmp_path))
    del drawn["Gaussian vectors"]
    assert drawn == {**{f"model {n}, round 2": [(n,)] for n in range(3)}, "clients": [(0,)]}


def test_spectra_of_many_global_models_share_a_line_of_the_legend(tmp_path: Path, drawn: dict[str, Any]):
    write_lines(tmp_path / "health.jsonl", spectra_of(20))
    write_plot("spectrum", tmp_path, tmp_path)
    assert set(drawn) == {"global models, round 2", "clients", "Gaussian vectors"}


@pytest.mark.parametrize(
    ("models", "title"),
    [(["a", "a"], "cosine with the global model"), (["a", "b"], "cosine with the client's global model")],
)
def test_cosines_name_what_they_are_with(tmp_path: Path, models: list[str], title: str):
    lines = [{**of_client(1, n, 0.9, 0.9, a=0.9), "model": model} for n, model in enumerate(models)]
    write_lines(tmp_path / "clients.jsonl", lines)
    plotted = plot_cosines(tmp_path)
    assert plotted is not None
    assert plotted.figure.axes[0].get_ylabel() == title


def test_a_figure_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_lines(tmp_path / "metrics.jsonl", [{"round": 1, "loss": 2.0}])
    file = write_plot("metrics", tmp_path, tmp_path)
    before = file.read_bytes()

    def cut(figure: Figure, stream: BinaryIO, **style: Any) -> None:
        stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", cut)
    with pytest.raises(InputError, match="metrics.png cannot be written"):
        write_plot("metrics", tmp_path, tmp_path)
    assert file.read_bytes() == before
    assert [one.name for one in (tmp_path / "figures").iterdir()] == ["metrics.png"]


def test_a_run_that_goes_on_is_drawn_as_far_as_it_is(tmp_path: Path):
    assert write_final_plots(tmp_path) == []
    write_lines(tmp_path / "metrics.jsonl", [{"round": 1, "loss": 2.0}])
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"round": 2, "lo')
    assert write_final_plots(tmp_path) == [tmp_path / "figures" / "metrics.png"]
