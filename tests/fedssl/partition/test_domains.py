"""The partition by domain."""

import numpy as np
import pytest
import torch

from fedssl.errors import InputError
from fedssl.partition import domain
from tests.fedssl.partition.made import partition_input

OWNERS = torch.tensor([2, 0, 2, 2, 0, 2, 2, 2, 0, 2])  # domains 0 (images 1, 4, 8) and 2 (the other 7)


def split(num_clients: int, *, owners: torch.Tensor | None = OWNERS, seed: int = 0, alpha=None, min_size: int = 1):
    labels = torch.arange(10) % 2
    data = partition_input(labels, num_clients=num_clients, owners=owners, seed=seed)
    return domain(data, alpha=alpha, min_size=min_size)


def test_clients_take_domains_in_turn_and_share_them_equally() -> None:
    """5 clients of 2 domains: clients 0, 2, 4 share 3 images, and clients 1, 3 share 7."""
    partition = split(5)
    parts = partition.client_indices
    assert sorted(np.concatenate(parts[0::2]).tolist()) == [1, 4, 8]
    assert sorted(np.concatenate(parts[1::2]).tolist()) == [0, 2, 3, 5, 6, 7, 9]
    assert [len(part) for part in parts] == [1, 4, 1, 3, 1]
    assert all((np.diff(part) > 0).all() for part in parts)
    assert partition.names == ("0", "2")
    assert torch.equal(partition.groups, (OWNERS == 2).long())
    other = split(5, seed=1).client_indices
    assert any(not np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def test_one_client_per_domain_has_all_its_images() -> None:
    assert [part.tolist() for part in split(2).client_indices] == [[1, 4, 8], [0, 2, 3, 5, 6, 7, 9]]


def test_alpha_divides_classes_among_the_clients_of_a_domain() -> None:
    owners, labels = torch.arange(400) // 200, torch.arange(400) % 4
    data = partition_input(labels, num_clients=6, owners=owners)
    parts = domain(data, alpha=0.1, min_size=2).client_indices
    assert all(len(owners[part].unique()) == 1 for part in parts)
    shares = [labels[part].bincount(minlength=4).max().item() / len(part) for part in parts]
    assert np.mean(shares) > 0.5  # equal classes: 0.25
    assert sorted(np.concatenate(parts).tolist()) == list(range(400))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_clients": 1}, r"num_clients=1 leaves 1 of 2 domains without a client; set num_clients=2 or more, or"),
        (
            {"num_clients": 8},
            r"domain '0' has 3 images for 4 of num_clients=8 clients, fewer than partition.min_size=1",
        ),
        ({"num_clients": 2, "owners": None}, r"partition=domain needs the domain of every image but the images have"),
    ],
)
def test_impossible_domains_are_refused(arguments, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        split(**arguments)


def test_remedies_of_too_few_images_work() -> None:
    owners, labels = torch.arange(60) % 3, torch.arange(60) % 2
    data = partition_input(labels, num_clients=9, owners=owners)
    with pytest.raises(InputError, match=r"some of the 3 clients of '\d' with fewer .*=2 of 20 .*; set ") as error:
        domain(data, alpha=0.01, min_size=2)
    remedies = str(error.value).partition("; set ")[2].split(": ")[0].split(", or ")
    assert [remedy.partition("=")[0] for remedy in remedies] == ["partition.alpha", "partition.min_size"]
    alpha, min_size = (int(remedy.partition("=")[2]) for remedy in remedies)
    assert min(map(len, domain(data, alpha=alpha, min_size=2).client_indices)) >= 2
    assert sum(map(len, domain(data, alpha=0.01, min_size=min_size).client_indices)) == 60
    unlabeled = partition_input(None, num_images=60, num_clients=9, owners=owners)
    with pytest.raises(InputError, match=r"alpha=0.01 divides the classes .* no labels; set partition.alpha=null"):
        domain(unlabeled, alpha=0.01, min_size=2)
    assert len(domain(unlabeled, alpha=None, min_size=2).client_indices) == 9
