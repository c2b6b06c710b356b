"""Projection of features onto a plane: UMAP (McInnes et al., 2018), t-SNE (van der Maaten and Hinton, 2008) or PCA.

Equal features have one point. A projection is a pure function of the features and the versions of the libraries.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from fedssl.config.overrides import did_you_mean
from fedssl.errors import InputError
from fedssl.plots.tsne import tsne
from fedssl.seeding import derive_seed

METHODS = ("auto", "umap", "tsne", "pca")
AUTO_TSNE = 5000  # different images up to which t-SNE is the default: half a minute on one core
FEWEST = 5  # different images for UMAP and t-SNE
REDUCED = 50  # principal components from which UMAP, t-SNE and clusters are computed, as in van der Maaten and Hinton


@dataclass(frozen=True)
class Projection:
    """Points of images, float32 ``(n, 2)``, of which the largest coordinate is 1, and how they were computed."""

    points: np.ndarray
    how: str


def check_method(method: str) -> None:
    """Raise `InputError` unless a projection exists and is installed."""
    if method not in METHODS:
        advice = did_you_mean(method, METHODS)
        raise InputError(f"projection={method} does not exist{advice}; choose one of {', '.join(METHODS)}")
    if method == "umap" and not find_spec("umap"):
        raise InputError("projection=umap needs umap-learn; install it: uv sync --extra umap, or choose tsne")


def project(unit: np.ndarray, *, method: str) -> Projection:
    """Project features ``(n, dim)`` of `unit_features` onto a plane."""
    distinct, inverse = np.unique(unit, axis=0, return_inverse=True)
    if method == "auto":
        method = "umap" if find_spec("umap") else "tsne" if len(distinct) <= AUTO_TSNE else "pca"
    if len(distinct) < FEWEST:
        method = "pca"
    reduced = principal_components(distinct, REDUCED)
    if method == "pca":
        points, how = reduced[:, :2], "PCA: distances in the plane show the two main directions only"
    elif method == "tsne":
        points, how = tsne(reduced), "t-SNE: near points have similar features, far distances have no meaning"
    else:
        points, how = _umap(reduced), "UMAP: near points have similar features, far distances have no meaning"
    points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))  # of a single dimension
    middle = (points.max(axis=0) + points.min(axis=0)) / 2
    points = points - middle
    largest = float(np.abs(points).max())
    return Projection((points / (largest or 1)).astype(np.float32)[inverse.reshape(-1)], how)


def principal_components(features: np.ndarray, count: int) -> np.ndarray:
    """Return the coordinates of features ``(n, dim)`` in their first principal directions, float32 ``(n, <= count)``.

    The sign of a direction, which is arbitrary, is that for which its largest entry is positive.
    """
    exact = features.astype(np.float64)
    exact -= exact.mean(axis=0)
    values, directions = np.linalg.eigh(exact.T @ exact)
    selected = directions[:, np.argsort(-values, kind="stable")[: min(count, len(features))]]
    largest = np.take_along_axis(selected, np.abs(selected).argmax(axis=0)[None], axis=0)
    coordinates: np.ndarray = exact @ (selected * np.sign(largest))
    return coordinates.astype(np.float32)


def _umap(features: np.ndarray) -> np.ndarray:
    from umap import UMAP

    seed = derive_seed(0, "UMAP") % 2**32
    reducer = UMAP(n_neighbors=min(15, len(features) - 1), init="pca", random_state=seed, n_jobs=1)
    points: np.ndarray = reducer.fit_transform(features)
    return points
