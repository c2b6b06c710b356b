"""t-SNE and sphere: points by hand, representations whose collapse is known, and the files of a run folder."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedssl.errors import InputError
from fedssl.plots import embeddings
from fedssl.plots.embeddings import on_sphere, tsne_points
from fedssl.plots.registry import write_plot
from fedssl.plots.tsne import tsne
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


def tsne_figure(representations: Representations, *, round: int) -> Figure:
    return embeddings.tsne_figure(representations, tsne_points(representations), round=round)


def draw_embeddings(folder: Path) -> list[Path]:
    return [file for name in ("tsne", "sphere") if (file := write_plot(name, folder, folder)) is not None]


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


def test_tsne_keeps_the_order_and_what_belongs_together():
    """Two classes far apart, of which a second model sees what the first does: neighbours are of one class."""
    centres = np.repeat(np.eye(2, 16), 30, axis=0)
    h = np.stack([centres + 0.05 * np.random.default_rng(seed).normal(size=centres.shape) for seed in (0, 1)])
    points = tsne(h.reshape(-1, 16)).reshape(2, 60, 2)
    flat, classes = points.reshape(-1, 2), np.tile(np.repeat([0, 1], 30), 2)
    distances = np.linalg.norm(flat[:, None] - flat[None], axis=2) + 1e9 * np.eye(len(flat))
    assert (classes[distances.argmin(axis=1)] == classes).all()


def test_tsne_figure_has_circles_and_crosses_of_the_same_images():
    labels = np.arange(30) % 10
    (axes,) = tsne_figure(some(labels=labels), round=7).axes
    assert axes.get_xlabel() == "t-SNE of the representations of 30 images, round 7; colors: classes"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["global model", "clients' models"]
    clouds = axes.collections
    assert [len(cloud.get_offsets()) for cloud in clouds] == [30, 30, 30]
    for cloud in clouds:  # an image has the colour of its class in every model
        colors = cloud.get_facecolors() if len(cloud.get_facecolors()) > 1 else cloud.get_edgecolors()
        assert len(np.unique(colors, axis=0)) == 10
        np.testing.assert_array_equal(colors[:10], colors[10:20])


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
