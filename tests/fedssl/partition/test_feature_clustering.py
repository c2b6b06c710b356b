"""Feature clusters: similar images form a cluster, independent of labels and processes."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits

from fedssl.config.load import compose
from fedssl.datasets.base import ImageData
from fedssl.datasets.images import TensorImages
from fedssl.datasets.raster import pixel_metadata
from fedssl.encoders import conv_small
from fedssl.errors import InputError
from fedssl.export import load_encoder, read_content, save_encoder
from fedssl.partition import (
    ImageSubset,
    PartitionInput,
    dirichlet,
    feature_clustering,
    feature_clusters,
    make_partition,
    server_indices,
)
from fedssl.partition.feature_clustering import cluster_images, encoder_features, k_means, whitened
from fedssl.plots.partition import partition_table
from fedssl.tensor_file import write_arrays

KIND = torch.randperm(90, generator=torch.Generator().manual_seed(0)) % 3  # 30 images of each of three kinds


def blobs(kind: torch.Tensor, *, channels: int = 1) -> torch.Tensor:
    """Images ``(n, channels, 8, 8)`` of a kind: some of its rows are bright, with noise of 10 gray levels."""
    noise = torch.randint(10, (len(kind), channels, 8, 8), generator=torch.Generator().manual_seed(1))
    bright = torch.arange(8).view(1, 1, 8, 1) % 3 == kind.view(-1, 1, 1, 1)
    return (noise + 200 * bright).to(torch.uint8)


def images_of(kind: torch.Tensor = KIND, *, cache: str | None = None, channels: int = 1) -> ImageSubset:
    return ImageSubset(TensorImages(blobs(kind, channels=channels)), torch.arange(len(kind)), cache)


def result(images: ImageSubset, **settings) -> np.ndarray:
    return cluster_images(images, **{"clusters": 3, "encoder": None, "components": 2, "seed": 0} | settings)


def divided(images: ImageSubset, num_clients: int = 3, **settings):
    settings = {"clusters": None, "alpha": 0.5, "min_size": 2, "components": 2} | settings
    data = PartitionInput(labels=None, images=images, num_clients=num_clients, seed=settings.pop("seed", 0))
    return feature_clusters(data, **settings)


def same_groups(a, b) -> bool:
    """Return whether two assignments are equal up to the numbering of groups."""
    return len(set(zip(a.tolist(), b.tolist(), strict=True))) == len(set(a.tolist())) == len(set(b.tolist()))


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    """The file of an encoder for gray images of 16 x 16."""
    settings = {"channels": 1, "size": 16, "width": 4}
    torch.manual_seed(0)
    target = {"_target_": "fedssl.encoders.conv_small"}
    statistics = {"mean": [0.5], "std": [0.25], "metadata": {}}
    save_encoder(tmp_path / "encoder.pt", conv_small(**settings), settings=target | settings, **statistics)
    return str(tmp_path / "encoder.pt")


def test_every_image_has_one_holder_and_groups_are_the_clusters() -> None:
    made_partition = divided(images_of())
    assert sorted(np.concatenate(made_partition.client_indices).tolist()) == list(range(90))
    for part in made_partition.client_indices:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
        assert len(part) >= 2
    assert made_partition.groups is not None
    assert same_groups(made_partition.groups, KIND)
    assert made_partition.names == ("cluster 0", "cluster 1", "cluster 2")


def test_shares_are_those_of_dirichlet_over_the_clusters() -> None:
    images = images_of()
    settings = {"alpha": 1.0, "min_size": 3, "self_balancing": True}
    labels = torch.from_numpy(result(images, seed=5))
    expected = dirichlet(PartitionInput(labels=labels, images=images, num_clients=4, seed=5), **settings)
    parts = divided(images, 4, clusters=3, seed=5, **settings).client_indices
    assert all(np.array_equal(a, b) for a, b in zip(parts, expected, strict=True))


def test_components_are_those_of_scikit_learn() -> None:
    """Whitened principal components, up to their signs and order; the last two of ten features are constant."""
    features = np.random.default_rng(0).normal(size=(1100, 10)) * np.arange(1, 11)
    features[:, 8:] = 3
    expected = PCA(4, whiten=True, svd_solver="full").fit_transform(features)
    points = whitened(features, components=4)[:, ::-1]
    assert np.abs(np.abs(points) - np.abs(expected)).max() < 1e-10
    everything = whitened(features, components=30)
    assert everything.shape == (1100, 8)  # no more than there are
    assert np.abs(np.cov(everything.T) - np.eye(8)).max() < 1e-10
    assert whitened(np.ones((5, 3)), components=2).tolist() == [[0.0]] * 5


def test_clusters_do_not_depend_on_threads(encoder: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (700, 1, 16, 16), dtype=torch.uint8, generator=generator)
    images = ImageSubset(TensorImages(pixels), torch.arange(700))
    threads = torch.get_num_threads()
    results = []
    for number in (1, 3):
        torch.set_num_threads(number)
        with threadpool_limits(limits=number):
            results.append(result(images, clusters=8, components=30, encoder=encoder))
    torch.set_num_threads(threads)
    assert np.array_equal(*results)
    assert not same_groups(results[0], result(images, clusters=8, components=30, seed=1))


def test_a_user_encoder(encoder: str) -> None:
    images = images_of()
    model = load_encoder(encoder)
    with torch.no_grad():
        expected = model(model.preprocess(images.source[:]))
    assert np.abs(encoder_features(images, encoder) - expected.numpy()).max() < 1e-6
    assert same_groups(result(images, encoder=encoder), KIND)


def test_stored_pixels_are_not_scaled_by_the_window_again(encoder: str, tmp_path: Path) -> None:
    """The pixels of a window are stored as uint16 with the maximum 65,535; 257 times a byte is the same share of it."""
    content = read_content(Path(encoder))
    model, file = load_encoder(encoder), tmp_path / "window.pt"
    about = pixel_metadata({"window": [0, 4095]})
    save_encoder(file, model, settings=content["encoder"], mean=model.mean, std=model.std, metadata=about)
    images = images_of()
    wide = ImageSubset(TensorImages((images.source[:].int() * 257).to(torch.uint16)), torch.arange(len(images)))
    expected = encoder_features(images, encoder)
    assert np.abs(encoder_features(wide, str(file)) - expected).max() < 1e-5
    assert np.abs(expected).max() > 0.05


def test_slow_results_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    images = images_of(cache=str(tmp_path))
    result(images)
    assert list(tmp_path.iterdir()) == []  # it was quick
    monkeypatch.setattr(feature_clustering, "MIN_SECONDS_TO_CACHE", 0.0)
    expected = result(images)
    (file,) = (tmp_path / "clusters").iterdir()
    with monkeypatch.context() as without:
        without.setattr(feature_clustering, "k_means", None)
        assert np.array_equal(result(images), expected)
        for other in ({"seed": 1}, {"components": 1}, {"clusters": 2}):
            with pytest.raises(TypeError):
                result(images, **other)
        with pytest.raises(TypeError):  # images that are others, or fewer
            result(images_of(KIND.flip(0), cache=str(tmp_path)))
        with pytest.raises(TypeError):
            result(ImageSubset(images.source, torch.arange(80), str(tmp_path)))
    write_arrays(file, {"clusters": expected[:50]})
    assert np.array_equal(result(images), expected)
    file.write_bytes(b"damaged")
    assert np.array_equal(result(images), expected)
    assert caplog.text.count("the images are clustered again") == 2


def test_in_a_run_without_labels_and_with_server_images() -> None:
    overrides = ["seed=4", "num_clients=3", "calibration=auxiliary", "calibration.share=0.2"]
    settings = compose([*overrides, "partition=feature_clusters", "partition.components=2"]).partition
    made_partition = make_partition(settings, ImageData(TensorImages(blobs(KIND)), None))
    kept = server_indices(90, share=0.2, seed=4)
    assert sorted([*kept, *np.concatenate(made_partition.client_indices)]) == list(range(90))
    assert set(made_partition.groups[kept].tolist()) == {-1}
    rest = np.setdiff1d(np.arange(90), kept)
    assert same_groups(made_partition.groups[rest], KIND[rest])
    groups = made_partition.groups, made_partition.names
    rows = list(csv.reader(partition_table(made_partition.client_indices, (None, ()), groups).splitlines()))
    assert rows[0] == ["client", "examples", "cluster 0", "cluster 1", "cluster 2"]
    assert sum(int(number) for row in rows[1:] for number in row[2:]) == 72


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clusters": 0}, "^partition.clusters=0 must be an integer of at least 1, or null$"),
        ({"clusters": 91}, "partition.clusters=91 must be from 1 to the number of images, 90"),
        ({"components": 0}, "^partition.components=0 must be an integer of at least 1$"),
        ({"alpha": 0}, "^partition.alpha=0 must be a number above 0$"),
        ({"min_size": -1}, "^partition.min_size=-1 must be an integer of at least 0$"),
        ({"min_size": 31}, "partition.min_size=31 of 90 images"),
        ({"num_clients": 50}, r"in every draw; set partition.min_size=0: clients with too few never train$"),
        ({"encoder": "/no/such/file"}, "partition.encoder=/no/such/file cannot be read .*encoder.pt of a run"),
    ],
)
def test_bad_settings_are_one_sentence(settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        divided(images_of(), **settings)
    assert "\n" not in str(caught.value)


def test_equal_images_and_an_encoder_for_other_channels(encoder: str) -> None:
    with pytest.raises(InputError, match="partition.clusters=3 but the images form 2 clusters, .* or fewer"):
        k_means(np.repeat([[0.0], [1.0]], 20, axis=0), clusters=3, seed=0)
    with pytest.raises(InputError, match="was trained on images with 1 channels but these have 3; .*null"):
        divided(images_of(channels=3), encoder=encoder)
