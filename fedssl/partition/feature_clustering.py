"""Feature clusters of Dec-SSL (Wang et al., ICLR 2023, section 3.1): heterogeneity of image content.

Images are clustered by k-means on their whitened principal components. The clusters are divided among the clients as
`dirichlet` divides classes. Labels are not used.

The authors use the features of an unpublished network, 30 whitened components, and SciPy's k-means with one cluster
per client. Here the features are pixels, averaged over small squares of larger images, or those of a given encoder.
k-means is initialized by k-means++.

Everything after the features is computed in float64 by one thread, so that the clusters depend on the seed but not on
the number of threads.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedssl.config.constraints import check_arguments
from fedssl.datasets.cache import MIN_SECONDS_TO_CACHE, cache_folder
from fedssl.datasets.raster import unit_values
from fedssl.datasets.storage import cache_error
from fedssl.digests import identity, new_identity
from fedssl.errors import InputError
from fedssl.evaluation.features import pixel_values
from fedssl.export import load_encoder
from fedssl.logs import log
from fedssl.machine.process import one_thread
from fedssl.partition.partition import ImageSubset, Partition, PartitionInput
from fedssl.partition.partitioners import divide_classes
from fedssl.seeding import derive_seed
from fedssl.tensor_file import read_arrays, write_arrays

MAX_VALUES = 1024  # pixel features per image: their covariance takes a second for 50,000 images
RESTARTS = 4  # of k-means; the best result is used
_COLUMN = "clusters"  # of the cached file
_CHUNK = 512  # images processed at a time
_MIN_VARIANCE_SHARE = 1e-10  # components with a smaller share of the largest variance are dropped


def feature_clusters(
    data: PartitionInput,
    *,
    clusters: int | None,
    alpha: float,
    min_size: int,
    self_balancing: bool = False,
    encoder: str | None = None,
    components: int = 30,
) -> Partition:
    r"""Divide each cluster of images among the clients by shares from Dir(alpha, ..., alpha).

    $$
    u_i = \Lambda^{-1/2} V^\top (x_i - \bar{x}) \qquad
    \min_{g, \mu} \sum_{i=1}^{n} \lVert u_i - \mu_{g_i} \rVert^2 \qquad
    (p_{g,1}, \dots, p_{g,K}) \sim \operatorname{Dir}(\alpha, \dots, \alpha)
    $$

    with $x_i$ the features of image i, V and $\Lambda$ the principal directions and variances, $g_i$ its cluster, and
    $p_{g,k}$ the share of cluster g for client k.
    """
    check_arguments("partition", alpha=alpha, min_size=min_size, clusters=clusters, components=components)
    clusters = data.num_clients if clusters is None else clusters
    assigned = torch.from_numpy(
        cluster_images(data.images, clusters=clusters, encoder=encoder, components=components, seed=data.seed)
    )
    clustered, names = replace(data, labels=assigned), ("feature_clusters", f"num_clients={data.num_clients} clients")
    parts = divide_classes(clustered, *names, alpha=alpha, min_size=min_size, self_balancing=self_balancing)
    return Partition(parts, assigned, "cluster")


def cluster_images(
    images: ImageSubset, *, clusters: int, encoder: str | None, components: int, seed: int
) -> np.ndarray:
    """Assign every image to a cluster, int64 ``(n,)``; results that take more than a second are cached in a file.

    ``encoder`` is the file of an encoder whose representations are clustered; None clusters the pixels. There are from
    1 to n ``clusters``, and at most ``components`` principal components.
    """
    if not 1 <= clusters <= len(images):
        raise InputError(f"partition.clusters={clusters} must be from 1 to the number of images, {len(images)}")

    def make() -> np.ndarray:
        log.info("clustering %s images by their features", f"{len(images):,}")
        with one_thread():
            features = pixel_features(images) if encoder is None else encoder_features(images, encoder)
        return k_means(whitened(features, components=components), clusters=clusters, seed=seed)

    settings = (clusters, components, seed, encoder and ("stored pixels", identity(_bytes_of(encoder))))
    return _cached(images, settings, make)


def pixel_features(images: ImageSubset) -> np.ndarray:
    """Return pixels in [0, 1], float32, ``(n, dim)`` with ``dim`` at most 1024, averaged over squares if needed."""
    return _in_chunks(images, partial(pixel_values, max_values=MAX_VALUES))


def encoder_features(images: ImageSubset, path: str) -> np.ndarray:
    """Compute the representations of a saved encoder on the CPU, float32, ``(n, feature_dim)``."""
    encoder: Any = load_encoder(path)
    channels = images.source.shape[1]
    if encoder.channels != channels:
        raise InputError(
            f"partition.encoder={path} was trained on images with {encoder.channels} channels but these have "
            f"{channels}; choose an encoder for {channels} channels, or null for pixels"
        )
    with torch.no_grad():
        features = _in_chunks(images, lambda chunk: encoder(encoder.preprocess.standardized(unit_values(chunk))))
    if not np.isfinite(features).all():
        raise InputError(f"partition.encoder={path} gives features that are NaN or infinite; choose another encoder")
    return features


def whitened(features: np.ndarray, *, components: int) -> np.ndarray:
    """Return the principal components of features ``(n, dim)``, each with variance 1: float64, ``(n, components)``.

    There are fewer if the features vary in fewer directions; one column of zeros if they do not vary.
    """
    from threadpoolctl import threadpool_limits

    count, dim = features.shape
    mean = features.mean(axis=0, dtype=np.float64)
    covariance = np.zeros((dim, dim))
    pieces = [slice(start, start + _CHUNK) for start in range(0, count, _CHUNK)]
    with threadpool_limits(limits=1):  # sums depend on the number of threads
        for piece in pieces:
            centered = features[piece] - mean
            covariance += centered.T @ centered / max(count - 1, 1)
        variances, directions = np.linalg.eigh(covariance)
        chosen = np.flatnonzero(variances > _MIN_VARIANCE_SHARE * variances[-1])[-components:]
        if not len(chosen):
            return np.zeros((count, 1))
        scaled = directions[:, chosen] / np.sqrt(variances[chosen])
        return np.concatenate([(features[piece] - mean) @ scaled for piece in pieces])


def k_means(points: np.ndarray, *, clusters: int, seed: int) -> np.ndarray:
    """Assign points ``(n, dim)`` to the nearest of ``clusters`` centers, int64, ``(n,)``."""
    from sklearn.cluster import KMeans  # slow import, not needed by other partitions
    from threadpoolctl import threadpool_limits

    random_state = derive_seed(seed, "partition", "clusters") % 2**32
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few distinct points, an error below
        nearest = KMeans(clusters, n_init=RESTARTS, random_state=random_state).fit_predict(points)
    assigned = np.asarray(nearest, dtype=np.int64)
    distinct = len(np.unique(assigned))
    if distinct < clusters:
        raise InputError(
            f"partition.clusters={clusters} but the images form {distinct} clusters, since many are equal; "
            f"set partition.clusters={distinct} or fewer"
        )
    return assigned


def _in_chunks(images: ImageSubset, features_of: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
    features: np.ndarray | None = None
    pieces = [slice(start, start + _CHUNK) for start in range(0, len(images), _CHUNK)]
    for piece, chunk in zip(pieces, images.chunks(_CHUNK), strict=True):
        computed = features_of(chunk).numpy()
        if features is None:
            features = np.empty((len(images), computed.shape[1]), np.float32)
        features[piece] = computed
    assert features is not None  # there are images
    return features


def _bytes_of(encoder: str) -> bytes:
    try:
        return Path(encoder).read_bytes()
    except OSError as error:
        raise InputError(
            f"partition.encoder={encoder} cannot be read ({error.strerror}); choose the encoder.pt of a run folder"
        ) from error


def _cached(images: ImageSubset, settings: tuple[Any, ...], make: Callable[[], np.ndarray]) -> np.ndarray:
    folder = cache_folder(images.cache)
    if folder is None:
        return make()
    versions = [version(name) for name in ("numpy", "torch", "scikit-learn")]
    hashed = new_identity(repr((settings, images.source.shape, versions)).encode())
    hashed.update(images.rows.numpy().data)
    for chunk in images.source.chunks(_CHUNK):
        hashed.update(chunk.contiguous().numpy().data)
    file = folder / "clusters" / f"{hashed.hexdigest()[:32]}.npz"
    stored = _read(file, len(images), settings[0])
    if stored is not None:
        return stored
    begin = time.perf_counter()
    assigned = make()
    if time.perf_counter() - begin > MIN_SECONDS_TO_CACHE:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(file, {_COLUMN: assigned})
        except OSError as error:
            if images.cache != "auto":
                raise cache_error(file.parent, error) from error
            log.warning("%s cannot be written (%s): every process clusters the images", file, error.strerror)
    return assigned


def _read(file: Path, count: int, clusters: int) -> np.ndarray | None:
    """Return the clusters in the file; None if it is missing or damaged."""
    try:
        stored = read_arrays(file)[_COLUMN]
        if stored.shape == (count,) and stored.dtype == np.int64 and stored.min() >= 0 and stored.max() < clusters:
            return stored
        reason = "unexpected content"
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged file can raise any exception
        reason = str(error)
    log.warning("%s is damaged (%s): the images are clustered again", file, reason)
    return None
