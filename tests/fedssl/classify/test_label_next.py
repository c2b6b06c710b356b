"""Images to label next."""

import numpy as np

from fedssl.classify.label_next import largest_cosines, next_to_label, typical, uncertain
from fedssl.embedding.embeddings import unit_features


def groups_of_images(sizes: list[int], *, spread: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Return unit features around orthogonal axes, and their axes."""
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    x = np.eye(16)[labels] + spread * generator.normal(size=(len(labels), 16))
    return unit_features(x.astype(np.float32), center=np.zeros(16)), labels


def test_first_images_are_those_of_different_groups_the_largest_first() -> None:
    x, labels = groups_of_images([40, 30, 20, 10], spread=0.05)
    chosen = next_to_label(x, x[:0], count=4, margins=None, seed=0)
    assert labels[chosen].tolist() == [0, 1, 2, 3]


def test_first_image_is_the_most_typical_of_its_cluster() -> None:
    x, _ = groups_of_images([30])
    first = next(typical(x, x[:0], count=1, seed=0))
    # Eq. 4 of the paper: the inverse mean distance to the 20 nearest neighbors, slowly.
    typicality = []
    for image in x.astype(np.float64):
        distances = sorted(np.sqrt(((image - other) ** 2).sum()) for other in x.astype(np.float64))
        typicality.append(1 / np.mean(distances[1:21]))
    assert first == int(np.argmax(typicality))


def test_groups_with_labeled_images_come_last() -> None:
    x, labels = groups_of_images([40, 20, 20], spread=0.05)
    known = np.flatnonzero(labels == 0)[:1]
    pool = np.setdiff1d(np.arange(80), known)
    chosen = next_to_label(x[pool], x[known], count=2, margins=None, seed=0)
    assert sorted(labels[pool[chosen]].tolist()) == [1, 2]


def test_near_duplicates_are_left_out() -> None:
    x, _ = groups_of_images([20, 20])
    copies = unit_features(x[:5, :16] + 1e-3, center=np.zeros(16))
    pool = np.concatenate([copies, x[5:10], x[5:10]])
    chosen = next_to_label(pool, x[:5], count=15, margins=None, seed=0)
    assert len(chosen) == 5
    assert {row % 5 for row in chosen} == set(range(5))
    assert min(chosen) >= 5
    assert next_to_label(copies, x[:5], count=3, margins=None, seed=0) == []


def test_uncertain_images_are_of_different_groups() -> None:
    x, labels = groups_of_images([50, 50], spread=0.05)
    margins = np.where(labels == 0, 0.1, 0.2) + np.arange(100) / 1e4
    margins[[60, 61]] = 0.01  # the most uncertain two are alike
    first = [row for row, _ in zip(uncertain(x, margins, count=2, seed=0), range(2), strict=False)]
    assert sorted(labels[first].tolist()) == [0, 1]
    ranked = list(uncertain(x, margins, count=2, seed=0))
    assert sorted(ranked) == list(range(100))
    assert margins[ranked[2:]].tolist() == sorted(margins[ranked[2:]])


def test_certain_images_are_not_chosen() -> None:
    x, _ = groups_of_images([100])
    margins = np.linspace(0, 1, 100)
    chosen = next_to_label(x, x[:0], count=3, margins=margins, seed=0)
    assert max(chosen) < 30


def test_more_images_than_there_are_give_all_once() -> None:
    x, _ = groups_of_images([7, 3])
    assert sorted(next_to_label(x, x[:0], count=50, margins=None, seed=0)) == list(range(10))


def test_cosines_equal_those_of_pairs() -> None:
    x, _ = groups_of_images([6, 6])
    groups = np.arange(12) // 2
    expected = [max(x[i] @ x[j] for j in range(12) if groups[i] != groups[j]) for i in range(12)]
    np.testing.assert_allclose(largest_cosines(x, x, groups=groups), expected, rtol=1e-5)
    assert largest_cosines(x, x[:0]).tolist() == [-1] * 12
