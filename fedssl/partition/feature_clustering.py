"""Feature clusters of Dec-SSL (Wang et al., ICLR 2023, section 3.1): heterogeneity of what images look like.

Images are clustered by k-means on their whitened principal components, and the clusters are divided among the clients
as `dirichlet` divides classes. No label is looked at.

The authors take features of a network that they do not publish, 30 whitened components and SciPy's k-means with as many
clusters as clients. Here the features are pixels, averaged over small squares where an image has many, or those of an
encoder of one's own; and k-means starts from k-means++.

All that follows the pixels is computed in float64 by one thread: the clusters are a function of the seed, whatever the
number of threads.
"""

import hashlib
import logging
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedssl.atomic_files import atomic_write
from fedssl.datasets.cache import MIN_SECONDS_TO_CACHE, cache_error, cache_folder
from fedssl.errors import InputError
from fedssl.evaluation.features import pixels
from fedssl.export import load_encoder
from fedssl.machine.threads import one_thread
from fedssl.partition.base import ImageSubset, Partition
from fedssl.partition.partitioners import check_counts, check_shares, dirichlet
from fedssl.seeding import derive_seed

MAX_VALUES = 1024  # numbers of an image without an encoder: their covariance takes a second for 50,000 images
RESTARTS = 4  # of k-means: the best of so many is taken
_CHUNK = 512  # images at a time
_MIN_VARIANCE_SHARE = 1e-10  # share of the largest variance below which a direction has none

log = logging.getLogger("fedssl")


def feature_clusters(
    labels: torch.Tensor | None,
    *,
    owners: torch.Tensor | None = None,
    images: ImageSubset,
    num_images: int,
    num_clients: int,
    seed: int,
    clusters: int | None,
    alpha: float,
    min_size: int,
    self_balancing: bool = False,
    encoder: str | None = None,
    components: int = 30,
) -> Partition:
    """Each cluster of images is divided among the clients by shares from Dir(alpha, ..., alpha).

    Parameters
    ----------
    clusters : int or None
        From 1 to the number of images; None: as many as clients.
    alpha, min_size, self_balancing
        As in `dirichlet`, for clusters in the place of classes.
    encoder, components
        As in `cluster_images`.
    """
    check_counts(num_images, num_clients)
    check_shares(alpha, min_size)
    clusters = num_clients if clusters is None else clusters
    if type(clusters) is not int:
        raise InputError(
            f"partition.clusters={clusters} is not a whole number; set one, or null for as many as clients"
        )
    found = torch.from_numpy(
        cluster_images(images, clusters=clusters, encoder=encoder, components=components, seed=seed)
    )
    parts = dirichlet(
        found,
        num_images=num_images,
        num_clients=num_clients,
        seed=seed,
        alpha=alpha,
        min_size=min_size,
        self_balancing=self_balancing,
    )
    return Partition(parts, found, "cluster")


def cluster_images(
    images: ImageSubset, *, clusters: int, encoder: str | None, components: int, seed: int
) -> np.ndarray:
    """The cluster of every image; what takes longer than a second is kept in a file for the next process.

    Parameters
    ----------
    images : ImageSubset
    clusters : int
        From 1 to the number of images.
    encoder : str or None
        File of an encoder whose representations are clustered; None: the pixels are.
    components : int
        Most principal components, at least 1.
    seed : int
        Seed of the run.

    Returns
    -------
    ndarray
        int64, ``(n,)``, from 0 to ``clusters - 1``.

    Raises
    ------
    InputError
        A setting is out of range, the encoder is for other images, or there are fewer different images than
        clusters.
    """
    if not 1 <= clusters <= len(images):
        raise InputError(f"partition.clusters={clusters} must be from 1 to the number of images, {len(images)}")
    if components < 1:
        raise InputError(f"partition.components={components} must be at least 1; Dec-SSL uses 30")

    def make() -> np.ndarray:
        log.info("clustering %s images by their features", f"{len(images):,}")
        with one_thread():
            features = pixel_features(images) if encoder is None else encoder_features(images, encoder)
        return k_means(whitened(features, components=components), clusters=clusters, seed=seed)

    settings = (clusters, components, seed, encoder and hashlib.sha256(_bytes_of(encoder)).hexdigest())
    return _cached(images, settings, make)


def pixel_features(images: ImageSubset) -> np.ndarray:
    """Pixels in [0, 1], float32, ``(n, dim)`` with ``dim`` at most 1024: means over squares of larger images."""
    return _in_chunks(images, lambda chunk: pixels(chunk, max_values=MAX_VALUES))


def encoder_features(images: ImageSubset, path: str) -> np.ndarray:
    """Representations by the encoder of a file, float32, ``(n, feature_dim)``, computed on the CPU."""
    encoder: Any = load_encoder(path)
    channels = images.source.shape[1]
    if encoder.channels != channels:
        raise InputError(
            f"partition.encoder={path} was trained on images with {encoder.channels} channels but these have "
            f"{channels}; give the encoder of such images, or null for their pixels"
        )
    with torch.inference_mode():
        features = _in_chunks(images, lambda chunk: encoder(encoder.preprocess(chunk)))
    if not np.isfinite(features).all():
        raise InputError(f"partition.encoder={path} gives features that are NaN or infinite; give another encoder")
    return features


def whitened(features: np.ndarray, *, components: int) -> np.ndarray:
    """Principal components of the features, each with variance 1.

    Parameters
    ----------
    features : ndarray
        ``(n, dim)``.
    components : int
        Most of them; there are fewer if the features vary in fewer directions.

    Returns
    -------
    ndarray
        float64, ``(n, at most components)``; one column of zeros if the features do not vary.
    """
    from threadpoolctl import threadpool_limits

    count, dim = features.shape
    mean = features.mean(axis=0, dtype=np.float64)
    covariance = np.zeros((dim, dim))
    pieces = [slice(start, start + _CHUNK) for start in range(0, count, _CHUNK)]
    with threadpool_limits(limits=1):  # sums of several threads depend on how many there are
        for piece in pieces:
            centred = features[piece] - mean
            covariance += centred.T @ centred / max(count - 1, 1)
        variances, directions = np.linalg.eigh(covariance)
        chosen = np.flatnonzero(variances > _MIN_VARIANCE_SHARE * variances[-1])[-components:]
        if not len(chosen):
            return np.zeros((count, 1))
        scaled = directions[:, chosen] / np.sqrt(variances[chosen])
        return np.concatenate([(features[piece] - mean) @ scaled for piece in pieces])


def k_means(points: np.ndarray, *, clusters: int, seed: int) -> np.ndarray:
    """The nearest of ``clusters`` centres for every one of the points ``(n, dim)``, int64, ``(n,)``.

    Raises
    ------
    InputError
        There are fewer different points than clusters.
    """
    from sklearn.cluster import KMeans  # here: a second, which other partitions need not wait for
    from threadpoolctl import threadpool_limits

    start = derive_seed(seed, "partition", "clusters") % 2**32
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of too few different points, which are refused below
        nearest = KMeans(clusters, n_init=RESTARTS, random_state=start).fit_predict(points)
    found = np.asarray(nearest, dtype=np.int64)
    different = len(np.unique(found))
    if different < clusters:
        raise InputError(
            f"partition.clusters={clusters} but the images fall into {different}, for many of them are alike; "
            f"give partition.clusters={different} or fewer"
        )
    return found


def _in_chunks(images: ImageSubset, features_of: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
    pieces = [slice(start, start + _CHUNK) for start in range(0, len(images), _CHUNK)]
    first = features_of(images[pieces[0]]).numpy()
    features = np.empty((len(images), first.shape[1]), np.float32)
    features[pieces[0]] = first
    for piece in pieces[1:]:
        features[piece] = features_of(images[piece]).numpy()
    return features


def _bytes_of(encoder: str) -> bytes:
    try:
        return Path(encoder).read_bytes()
    except OSError as error:
        raise InputError(
            f"partition.encoder={encoder} cannot be read ({error.strerror}); give the encoder.pt of a run folder"
        ) from error


def _cached(images: ImageSubset, settings: tuple[Any, ...], make: Callable[[], np.ndarray]) -> np.ndarray:
    """What was made before of the same images with the same settings, or is made now."""
    if images.cache is None:
        return make()
    hashed = hashlib.sha256(repr((settings, images.source.shape, _versions())).encode())
    hashed.update(images.rows.numpy().data)
    for chunk in images.source.split(_CHUNK):
        hashed.update(chunk.contiguous().numpy().data)
    file = cache_folder(images.cache) / "clusters" / f"{hashed.hexdigest()[:32]}.npy"
    found = _read(file, len(images), settings[0])
    if found is not None:
        return found
    begin = time.perf_counter()
    made = make()
    if time.perf_counter() - begin > MIN_SECONDS_TO_CACHE:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, lambda stream: np.save(stream, made))
        except OSError as error:
            if images.cache != "auto":
                raise cache_error(file.parent, error) from error
            log.warning("%s cannot be written (%s): every process clusters the images", file, error.strerror)
    return made


def _versions() -> list[str]:
    return [version(name) for name in ("numpy", "torch", "scikit-learn")]


def _read(file: Path, count: int, clusters: int) -> np.ndarray | None:
    """The clusters in the file; None if there is none, or not one of such clusters."""
    try:
        found: np.ndarray = np.load(file, allow_pickle=False)
        if found.shape == (count,) and found.dtype == np.int64 and found.min() >= 0 and found.max() < clusters:
            return found
        reason = "it holds something else"
    except FileNotFoundError:
        return None
    except Exception as error:  # there is no end to how reading a damaged file can fail
        reason = str(error)
    log.warning("%s is damaged (%s): the images are clustered again", file, reason)
    return None
