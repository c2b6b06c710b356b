"""t-SNE and sphere: points by hand, representations whose collapse is known, and the files of a run folder."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedssl.datasets.base import NO_LABEL
from fedssl.errors import InputError
from fedssl.plots import embeddings
from fedssl.plots.embeddings import (
    MARKERS,
    on_sphere,
    tsne,
    tsne_points,
)
from fedssl.plots.registry import write_plot
from fedssl.runs.representations import Representations, read_representations


def unit(*shape: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=shape)
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float16)


def some(
    models: int = 3, n: int = 30, dim: int = 8, *, global_models: int = 1, **arrays: np.ndarray
) -> Representations:
    """The first are global models, the others clients'."""
    first = ["global model"] if global_models == 1 else [f"model {number}" for number in range(global_models)]
    names = [*first, *(f"client {number}" for number in range(models - global_models))]
    return Representations(names=np.array(names), globals=np.array(global_models), h=unit(models, n, dim), **arrays)


def test_images_without_a_label_are_gray(tmp_path: Path) -> None:
    some(labels=np.array([NO_LABEL, *range(29)])).save(tmp_path, round=1)
    _, saved = read_representations(tmp_path)
    assert saved.labels[0] == NO_LABEL
    assert embeddings._shades(saved.labels)[0].tolist() == [*[211 / 255] * 3, 1]  # lightgrey
    assert embeddings._shades(np.full(2, NO_LABEL)).tolist() == [[*[211 / 255] * 3, 1]] * 2


def tsne_figure(representations: Representations, *, round: int) -> Figure:
    return embeddings.tsne_figure(representations, tsne_points(representations), round=round)


def sphere_figure(representations: Representations, *, round: int) -> Figure:
    vectors = representations.h if representations.z is None else representations.z
    return embeddings.sphere_figure(representations, [on_sphere(one) for one in vectors[:6]], round=round)


def draw_embeddings(folder: Path) -> list[Path]:
    return [file for name in ("tsne", "sphere") if (file := write_plot(name, folder, folder)) is not None]


# --- the sphere ---


def test_three_dimensions_stay_as_they_are():
    h = unit(20, 3)
    points, share = on_sphere(h)
    np.testing.assert_array_equal(points, h)
    assert share == 1


def test_principal_directions_by_hand():
    # The products of columns sum to diag(1.44, 1.28, 0.72, 0.56): the directions are e1, e2 and e3, and e4 is dropped.
    # (0.6, 0, 0.6, 0.53) keeps (0.6, 0, 0.6) of length 0.85, which becomes (0.71, 0, 0.71).
    c, d, s = np.sqrt(0.36), np.sqrt(0.28), np.sqrt(0.5)
    h = np.array([[0.6, 0.8, 0, 0], [0.6, -0.8, 0, 0], [0.6, 0, c, d], [0.6, 0, -c, -d]])
    h = np.concatenate([h, h * [1, 1, 1, -1]])  # no two columns have anything in common
    points, share = on_sphere(h)
    assert share == pytest.approx((1.44 + 1.28 + 0.72) / 4)
    assert (points[:, 0] > 0).all()  # what all images have in common comes forward
    expected = [[0.6, 0.8, 0], [0.6, 0.8, 0], [s, 0, s], [s, 0, s]] * 2
    np.testing.assert_allclose(np.abs(points), expected, atol=1e-9)
    assert points[0, 1] == pytest.approx(-points[1, 1])
    assert points[2, 2] == pytest.approx(-points[3, 2])


def test_angles_survive_if_everything_lies_in_three_dimensions():
    inside = unit(40, 3).astype(np.float64)
    basis, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(50, 3)))
    points, share = on_sphere(inside @ basis.T)
    assert share == pytest.approx(1)
    np.testing.assert_allclose(points @ points.T, inside @ inside.T, atol=1e-3)  # float16


def test_a_collapse_leaves_the_sphere_blank():
    noise = np.random.default_rng(2).normal(size=(100, 64))

    def around(width: float) -> np.ndarray:
        h = np.eye(64)[0] + width * noise
        return on_sphere(h / np.linalg.norm(h, axis=1, keepdims=True))[0]

    assert np.ptp(around(1e-4), axis=0).max() < 1e-3  # one point, not the noise around it
    assert np.ptp(around(0.2), axis=0).max() > 0.5


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fewer_images_than_directions(n: int):
    points, share = on_sphere(unit(n, 8))
    assert points.shape == (n, 3)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1, atol=1e-3)
    assert share == pytest.approx(1)


def test_representations_of_zeros_are_in_the_centre():
    points, share = on_sphere(np.zeros((5, 8)))
    assert not points.any()
    assert share == 0


# --- t-SNE ---


def test_tsne_keeps_the_order_and_what_belongs_together():
    """Two classes far apart, of which a second model sees what the first does: neighbours are of one class."""
    centres = np.repeat(np.eye(2, 16), 30, axis=0)
    h = np.stack([centres + 0.05 * np.random.default_rng(seed).normal(size=centres.shape) for seed in (0, 1)])
    points = tsne(h)
    assert points.shape == (2, 60, 2)
    flat, classes = points.reshape(-1, 2), np.tile(np.repeat([0, 1], 30), 2)
    distances = np.linalg.norm(flat[:, None] - flat[None], axis=2) + 1e9 * np.eye(len(flat))
    assert (classes[distances.argmin(axis=1)] == classes).all()


@pytest.mark.parametrize("h", [np.ones((2, 20, 8)) / np.sqrt(8), unit(1, 2, 8), unit(2, 2, 8)])
def test_tsne_of_one_point_and_of_few(h: np.ndarray):
    assert np.isfinite(tsne(h)).all()


def test_a_seed_counts_where_all_points_coincide():
    h = np.ones((1, 20, 8))
    assert (tsne(h, seed=0) != tsne(h, seed=1)).any()


# --- figures ---


def test_tsne_figure_has_circles_and_crosses_of_the_same_images():
    labels = np.arange(30) % 10
    (axes,) = tsne_figure(some(labels=labels), round=7).axes
    assert axes.get_xlabel() == "t-SNE of the representations of 30 images, round 7; colours: classes"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["global model", "clients' models"]
    clouds = axes.collections
    assert [len(cloud.get_offsets()) for cloud in clouds] == [30, 30, 30]
    for cloud in clouds:  # an image has the colour of its class in every model
        colors = cloud.get_facecolors() if len(cloud.get_facecolors()) > 1 else cloud.get_edgecolors()
        assert len(np.unique(colors, axis=0)) == 10
        np.testing.assert_array_equal(colors[:10], colors[10:20])


def test_tsne_figure_without_labels_is_coloured_by_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedssl.plots.embeddings.tsne", lambda h, seed: np.zeros((*h.shape[:2], 2)))
    (axes,) = tsne_figure(some(), round=1).axes
    assert axes.get_xlabel().endswith("colours: models")
    (axes,) = tsne_figure(some(models=1), round=1).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["global model"]


def legend(figure) -> dict[str, str]:
    """The mark of every label."""
    (axes,) = figure.axes
    found = axes.get_legend()
    return {text.get_text(): line.get_marker() for text, line in zip(found.get_texts(), found.get_lines(), strict=True)}


def test_a_few_global_models_have_marks_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedssl.plots.embeddings.tsne", lambda h, seed: np.zeros((*h.shape[:2], 2)))
    drawn = []
    scatter = Axes.scatter
    monkeypatch.setattr(
        Axes, "scatter", lambda *args, **style: drawn.append(style["marker"]) or scatter(*args, **style)
    )
    figure = tsne_figure(some(models=5, global_models=3, labels=np.arange(30)), round=1)
    assert legend(figure) == {"model 0": "o", "model 1": "s", "model 2": "^", "clients' models": "x"}
    assert drawn == ["x", "x", "^", "s", "o"]  # the global models on top
    figure = tsne_figure(some(models=7, global_models=7), round=1)  # a model for every client
    assert legend(figure) == {"global models": "o"}
    assert len(MARKERS) == len(set(MARKERS)) == 6


def test_sphere_figure_says_how_the_points_came_there():
    figure = sphere_figure(some(models=9, labels=np.arange(30)), round=3)
    assert [axes.get_title() for axes in figure.axes] == ["global model", *(f"client {number}" for number in range(5))]
    caption = figure.get_supxlabel()
    assert caption.startswith("representations of 8 dimensions on their 3 principal directions\n(")
    assert caption.endswith("of their squared length), round 3; colours: classes")
    figure = sphere_figure(some(models=9, global_models=2), round=3)
    assert [axes.get_title() for axes in figure.axes][:3] == ["model 0", "model 1", "client 0"]
    figure = sphere_figure(some(dim=3), round=3)
    assert figure.get_supxlabel() == "representations as they are, round 3"
    figure = sphere_figure(some(z=unit(3, 30, 3, seed=5)), round=3)
    assert figure.get_supxlabel() == "projections as they are, round 3"


# --- run folders ---


def test_what_is_written_is_read_again(tmp_path):
    assert read_representations(tmp_path) is None
    whole = some(labels=np.arange(30), z=unit(3, 30, 3))
    whole.save(tmp_path, round=4)
    some().save(tmp_path, round=5)
    round, found = read_representations(tmp_path)
    assert round == 5
    assert found.z is found.labels is None
    whole.save(tmp_path, round=6)
    _, found = read_representations(tmp_path)
    for name in ("names", "globals", "h", "z", "labels"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
    assert [file.name for file in tmp_path.iterdir()] == ["representations.npz"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nonsense"])
def test_a_damaged_file_is_one_sentence(tmp_path, content: bytes):
    (tmp_path / "representations.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"representations\.npz cannot be used \(it .*\); restore it from a copy"):
        draw_embeddings(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"h": unit(3, 30, 5)[0]},
        {"h": np.full((3, 30, 5), np.nan)},
        {"h": np.ones((3, 30, 5), int)},
        {"z": unit(3, 30, 4)},
        {"z": unit(3, 29, 3)},
        {"names": np.array(["one"])},
        {"globals": np.array([1])},
        {"labels": np.arange(29)},
        {"labels": -np.arange(30)},
    ],
)
def test_arrays_that_do_not_fit_each_other_are_one_sentence(tmp_path, change: dict):
    replace(some(), **change).save(tmp_path, round=1)
    with pytest.raises(InputError, match="it does not contain representations"):
        draw_embeddings(tmp_path)


def test_figures_of_a_run_folder(tmp_path):
    some(labels=np.arange(30) % 3).save(tmp_path, round=4)
    drawn = draw_embeddings(tmp_path)
    assert drawn == [tmp_path / "figures" / "tsne.png", tmp_path / "figures" / "sphere.png"]
    some(models=1, n=1).save(tmp_path, round=4)
    assert draw_embeddings(tmp_path) == drawn[1:]
    some(labels=np.arange(30) % 3).save(tmp_path, round=4)
    draw_embeddings(tmp_path)
    first = [file.read_bytes() for file in drawn]
    assert all(content.startswith(b"\x89PNG") for content in first)
    assert [file.read_bytes() for file in draw_embeddings(tmp_path)] == first
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["sphere.png", "tsne.png"]
