"""Partitioners: every image has exactly one client, and the settings have their documented effect."""

import numpy as np
import pytest
import torch

from fedssl import partition
from fedssl.datasets.base import NO_LABEL
from fedssl.errors import InputError
from fedssl.partition.partitioners import dirichlet_rows
from fedssl.seeding import derive_seed, numpy_generator
from tests.fedssl.partition.made import partition_input

KINDS = {"iid": {}, "dirichlet": {"alpha": 0.5, "min_size": 2}}
KINDS |= {"pathological": {"classes_per_client": 3}, "skew": {"beta": 0.3}}


def labels_of(*counts: int) -> torch.Tensor:
    """Class-sorted labels: ``counts[c]`` images of class c."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def split(kind: str, labels: torch.Tensor | None, num_clients: int, *, seed: int = 0, **settings) -> list[np.ndarray]:
    data = partition_input(labels, num_images=settings.pop("num_images", None), num_clients=num_clients, seed=seed)
    return getattr(partition, kind)(data, **settings)


def counts_of(parts: list[np.ndarray], labels: torch.Tensor) -> np.ndarray:
    """Count the images of each client and class ``(clients, classes)`` one by one."""
    return np.array([[int((labels[part] == c).sum()) for c in range(int(labels.max()) + 1)] for part in parts])


@pytest.mark.parametrize("num_clients", [1, 7, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_every_image_has_exactly_one_holder(kind: str, num_clients: int) -> None:
    labels = labels_of(61, 97, 83, 120, 39)[torch.randperm(400, generator=torch.Generator().manual_seed(1))]
    more = {"classes_per_client": 5} if kind == "pathological" else {}
    settings = KINDS[kind] | (more if num_clients == 1 else {})
    parts = split(kind, labels, num_clients, **settings)
    assert len(parts) == num_clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(400))
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) >= 2
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_parts_other_seed_others(kind: str) -> None:
    labels = labels_of(*[40] * 5)
    first, again = (split(kind, labels, 5, seed=3, **KINDS[kind]) for _ in range(2))
    other = split(kind, labels, 5, seed=4, **KINDS[kind])
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("self_balancing", [False, True])
def test_dirichlet_equals_its_definition(self_balancing: bool) -> None:
    """Per class: shares from Dir(alpha 1), cut points at the floor of cumulative shares times the class's size.

    With self-balancing, clients with more than 100 / 4 images have the share 0, and the others are normalized.
    """
    labels = labels_of(33, 50, 17)
    settings = {"self_balancing": True} if self_balancing else {}
    parts = split("dirichlet", labels, 4, seed=5, alpha=2.0, min_size=2, **settings)
    full = 0
    order = numpy_generator(5, "partition", "order").permutation(100)
    generator = np.random.default_rng(derive_seed(5, "partition", "shares"))
    expected: list[list[int]] = [[], [], [], []]
    for name in range(3):
        members = [position for position in order if labels[position] == name]
        share = generator.dirichlet([2.0] * 4)
        if self_balancing:
            share = np.array([0 if len(expected[k]) > 25 else share[k] for k in range(4)])
            full += int((share == 0).sum())
            share /= share.sum()
        cuts = [0, *(int(share[: k + 1].sum() * len(members)) for k in range(3)), len(members)]
        for client in range(4):
            expected[client] += members[cuts[client] : cuts[client + 1]]
    assert [part.tolist() for part in parts] == [sorted(positions) for positions in expected]
    assert (full > 0) == self_balancing  # otherwise self-balancing was not tested


class LabelColumn:
    """A ``datasets.Dataset`` with one column; a selection is an array of row numbers."""

    def __init__(self, labels: np.ndarray) -> None:
        self._labels, self.num_rows = labels, len(labels)

    def __getitem__(self, column: str) -> np.ndarray:
        return self._labels

    def unique(self, column: str) -> list[int]:
        return np.unique(self._labels).tolist()

    def select(self, indices: list[int]) -> np.ndarray:
        return np.asarray(indices, dtype=np.int64)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The specified min_partition_size")
def test_dirichlet_equals_flwr_datasets_wherever_that_succeeds() -> None:
    """And fails where that fails after 11 draws; where a draw of that has no client for a class, ours draws again."""
    from flwr_datasets.partitioner import DirichletPartitioner

    draws, succeeded, ended = np.random.default_rng(1), 0, 0
    for _ in range(150):
        labels = 3 * draws.integers(0, draws.integers(1, 9), draws.integers(20, 300))
        num_clients, min_size, seed = (int(draws.integers(*bounds)) for bounds in ((1, 15), (0, 6), (0, 10**6)))
        alpha, self_balancing = float(10 ** draws.uniform(-3, 3)), bool(draws.integers(2))
        options = {"alpha": alpha, "min_partition_size": min_size, "self_balancing": self_balancing}
        partitioner = DirichletPartitioner(num_clients, "label", shuffle=False, seed=seed, **options)
        partitioner._dataset = LabelColumn(labels)
        try:
            with np.errstate(invalid="raise"):
                expected = [partitioner.load_partition(client).tolist() for client in range(partitioner.num_partitions)]
        except FloatingPointError:  # 0 / 0
            ended += 1
            continue
        except ValueError:
            expected = None
        settings = {"alpha": alpha, "min_size": min_size, "seed": seed, "self_balancing": self_balancing}
        ours = dirichlet_rows(labels, num_clients=num_clients, **settings)
        assert (None if ours is None else [rows.tolist() for rows in ours]) == expected
        succeeded += expected is not None
    assert 50 < succeeded < 150 - ended < 150


@pytest.mark.parametrize("num_clients", [5, 10, 13])
def test_classes_gives_exactly_n_classes_and_shares_each_equally(num_clients: int) -> None:
    labels = labels_of(*[60] * 10)
    counts = counts_of(split("pathological", labels, num_clients, classes_per_client=2), labels)
    assert ((counts > 0).sum(axis=1) == 2).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.min() >= 1
    assert holders.max() - holders.min() <= 1
    # 60 images of a class divide into equal parts for 1, 2 or 3 holders.
    assert all(set(column[column > 0]) == {60 // n} for column, n in zip(counts.T, holders, strict=True))


def test_skew_extremes_and_middle() -> None:
    labels = labels_of(4, 4, 4)
    # beta=0: blocks of 12/3 = 4 of the class-sorted images are exactly the classes.
    assert counts_of(split("skew", labels, 3, beta=0), labels).tolist() == [[4, 0, 0], [0, 4, 0], [0, 0, 4]]
    # beta=0.5: 2 of each class are sorted, in blocks of 2: client c has 2 of class c; the other 6 are dealt out.
    middle = counts_of(split("skew", labels, 3, beta=0.5), labels)
    assert middle.sum(axis=1).tolist() == [4, 4, 4]
    assert (np.diag(middle) >= 2).all()
    # Two clients, classes of 3 and 5, beta=0: blocks of 4 are [3, 1] and [0, 4].
    uneven = labels_of(3, 5)
    assert counts_of(split("skew", uneven, 2, beta=0), uneven).tolist() == [[3, 1], [0, 4]]
    # beta=1: IID, sizes equal, no client of one class in 1,000 images.
    many = labels_of(500, 500)
    counts = counts_of(split("skew", many, 5, beta=1), many)
    assert counts.sum(axis=1).tolist() == [200] * 5
    assert np.abs(counts[:, 0] - 100).max() < 26


# 7 owners with 3, 4, ... 9 images; numbers with gaps, as a limited set has them.
OWNERS = torch.repeat_interleave(torch.tensor([2, 3, 5, 7, 11, 13, 17]), torch.arange(3, 10))
OWNERS = OWNERS[torch.randperm(42, generator=torch.Generator().manual_seed(2))]


def natural(owners: torch.Tensor, num_clients: int, *, seed: int = 0) -> list:
    data = partition_input(None, owners=owners, num_images=len(owners), num_clients=num_clients, seed=seed)
    return partition.natural(data)


def test_natural_deals_owners_in_turn_by_hand() -> None:
    # The seed draws a place in the order for each owner; the client is that place modulo the number of clients.
    place = numpy_generator(5, "partition", "owners").permutation(4).tolist()
    owners = torch.tensor([30, 10, 20, 10, 40, 30, 30, 20, 40])  # sorted: 10, 20, 30, 40
    images = {10: [1, 3], 20: [2, 7], 30: [0, 5, 6], 40: [4, 8]}
    expected: list[list[int]] = [[], []]
    for owner, turn in zip((10, 20, 30, 40), place, strict=True):
        expected[turn % 2] += images[owner]
    parts = natural(owners, 2, seed=5)
    assert [part.tolist() for part in parts] == [sorted(positions) for positions in expected]


def test_natural_without_owners_is_one_sentence() -> None:
    message = r"the images have none; .*dataset\.owner=COLUMN.*dataset\.folders=owner.*partition=iid$"
    with pytest.raises(InputError, match=message) as caught:
        partition.natural(partition_input(None, owners=None, num_images=42, num_clients=2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("iid", {"num_clients": 0}, "num_clients=0"),
        ("dirichlet", {"alpha": 0, "min_size": 2}, r"^partition\.alpha=0 must be a number above 0$"),
        ("dirichlet", {"alpha": -1.0, "min_size": 2}, r"partition\.alpha=-1\.0"),
        ("dirichlet", {"alpha": float("nan"), "min_size": 2}, r"partition\.alpha=nan"),
        ("dirichlet", {"alpha": 1.0, "min_size": -1}, r"^partition\.min_size=-1 must be an integer of at least 0$"),
        (
            "dirichlet",
            {"alpha": 0.01, "min_size": 5, "num_clients": 20},
            r"partition\.alpha=0\.01 .*num_clients=20 .*partition\.min_size=5 of 100 images.*; set num_clients=2, or",
        ),
        ("dirichlet", {"alpha": 5.0, "min_size": 30}, r"partition\.min_size=30 of 100 images"),
        ("pathological", {"classes_per_client": 0}, r"partition\.classes_per_client=0 must be from 1 to the 5 classes"),
        ("pathological", {"classes_per_client": 6}, r"partition\.classes_per_client=6 must be from 1 to the 5 classes"),
        (
            "pathological",
            {"classes_per_client": 2, "num_clients": 2},
            "leaves 1 of 5 classes unassigned; give at least 3 classes per client or 5 clients",
        ),
        (
            "pathological",
            {"classes_per_client": 5, "num_clients": 40},
            "divides each class among 40 of them but the smallest class has 20 images",
        ),
        ("pathological", {"classes_per_client": 1, "num_clients": 50, "counts": (4, 96)}, "among 25 of them .* has 4"),
        ("skew", {"beta": -0.1}, r"^partition\.beta=-0\.1 must be a number from 0 to 1$"),
        ("skew", {"beta": 1.1}, r"^partition\.beta=1\.1 must be at most 1$"),
    ],
)
def test_bad_settings_are_one_sentence(kind: str, settings: dict, message: str) -> None:
    settings = dict(settings)
    labels = labels_of(*settings.pop("counts", [20] * 5))
    with pytest.raises(InputError, match=message) as caught:
        split(kind, labels, settings.pop("num_clients", 4), **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["dirichlet", "pathological", "skew"])
def test_partitions_by_class_need_labels(kind: str) -> None:
    with pytest.raises(InputError, match=f"partition={kind} .*no labels; give partition=iid"):
        split(kind, None, 4, num_images=100, **KINDS[kind])


@pytest.mark.parametrize("kind", ["dirichlet", "pathological", "skew"])
def test_images_without_a_label_are_dealt_evenly(kind: str) -> None:
    labels = labels_of(61, 97, 83)
    alone = split(kind, labels, 5, **KINDS[kind])
    some = torch.full((255,), NO_LABEL)
    known = np.delete(np.arange(255), np.arange(0, 255, 18)[:14])  # 14 of 255 have none
    some[known] = labels
    parts = split(kind, some, 5, **KINDS[kind])
    assert sorted(np.concatenate(parts).tolist()) == list(range(255))
    assert sorted(int((some[part] == NO_LABEL).sum()) for part in parts) == [2, 3, 3, 3, 3]
    assert all(
        np.array_equal(one, other) for one, other in zip(parts, split(kind, some, 5, **KINDS[kind]), strict=True)
    )
    unlabeled = [part[some[part] == NO_LABEL].tolist() for part in parts]
    assert unlabeled != [part[some[part] == NO_LABEL].tolist() for part in split(kind, some, 5, seed=1, **KINDS[kind])]
    sizes = [len(part) for part in alone]
    if kind != "dirichlet":  # whose shares are random: another order of the images, another rounding
        assert sorted(len(part) - len(rows) for part, rows in zip(parts, unlabeled, strict=True)) == sorted(sizes)


def remedies_of(error: InputError) -> list[tuple[str, int]]:
    text = str(error).partition("; set ")[2].partition(": ")[0]
    pairs = [remedy.removeprefix("partition.").split("=") for remedy in text.split(", or ")]
    return [(key, int(value)) for key, value in pairs]


@pytest.mark.parametrize(("num_clients", "alpha"), [(10, 0.001), (60, 0.5), (500, 0.5)])
def test_remedies_of_too_few_images_work(num_clients, alpha):
    labels = labels_of(*[20] * 10)
    with pytest.raises(InputError, match="fewer than partition.min_size=2 of 200 images in every draw; set ") as caught:
        split("dirichlet", labels, num_clients, alpha=alpha, min_size=2)
    for key, value in remedies_of(caught.value):
        split("dirichlet", labels, **{"num_clients": num_clients, "alpha": alpha, "min_size": 2, key: value})
    keys = [key for key, _ in remedies_of(caught.value)]
    assert keys == [*["alpha"] * (num_clients == 10), "num_clients", "min_size"]


def test_a_draw_without_a_client_for_a_class_is_repeated() -> None:
    """The first draw of this seed has one; ten classes of equal size can fill all of five clients."""
    labels = labels_of(*[20] * 10)
    settings = {"alpha": 0.01, "min_size": 2, "self_balancing": True, "seed": 8}
    assert min(map(len, split("dirichlet", labels, 5, **settings))) >= 2


@pytest.mark.parametrize("min_size", [0, 2])
def test_remedies_of_draws_without_a_client_work(min_size) -> None:
    """The first class fills one of two clients. All of the next six must have drawn the other: (1 / 2)^6 a draw."""
    labels = labels_of(150, *[10] * 6)
    settings = {"num_clients": 2, "alpha": 1e-6, "min_size": min_size, "self_balancing": True}
    with pytest.raises(InputError, match="a class to none of num_clients=2 clients .* in every draw") as caught:
        split("dirichlet", labels, **settings)
    assert "min_size=0" not in str(caught.value)
    remedies = remedies_of(caught.value)
    assert [key for key, _ in remedies] == ["alpha", "num_clients", "seed"]
    for key, value in remedies:
        split("dirichlet", labels, **{**settings, key: value})


def test_a_remedy_leaves_a_client_that_trains() -> None:
    with pytest.raises(InputError, match="fewer than partition.min_size=2 of 1 images in every draw; set another part"):
        split("dirichlet", labels_of(1), num_clients=1, alpha=1.0, min_size=2)
