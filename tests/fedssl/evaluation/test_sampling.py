"""Draws of labeled images: the class frequencies of a client."""

import pytest
import torch

from fedssl.evaluation.sampling import sample_label_matched


def labels(**counts):
    return torch.tensor([int(name[1:]) for name, number in counts.items() for _ in range(number)])


def drawn(test, own, seed=0):
    rows = sample_label_matched(test, own, generator=torch.Generator().manual_seed(seed))
    assert rows.tolist() == sorted(set(rows.tolist()))
    return torch.bincount(test[rows], minlength=4).tolist()


@pytest.mark.parametrize(
    ("test", "own", "expected"),
    [
        # Shares of 3/4 and 1/4: the 12 images of class 0 are 3/4 of 16, so that 4 come from class 1.
        ({"c0": 12, "c1": 12, "c2": 12}, {"c0": 30, "c1": 10}, [12, 4, 0, 0]),
        # Class 1 is scarce: 2 are 1/4 of 8.
        ({"c0": 12, "c1": 2}, {"c0": 30, "c1": 10}, [6, 2, 0, 0]),
        # 7 of class 0 for 1 of class 1 where 3 are there of class 0: 3/7 of an image is none.
        ({"c0": 3, "c1": 9}, {"c0": 7, "c1": 1}, [3, 0, 0, 0]),
        # No test image has class 3.
        ({"c0": 4, "c1": 4}, {"c0": 1, "c1": 1, "c3": 8}, [4, 4, 0, 0]),
        ({"c0": 4}, {"c3": 8}, [0, 0, 0, 0]),
        # 40 images of the client and 5 of the test have no class: shares of 3/4 and 1/4 as above, not 3/8 and 1/8.
        ({"c0": 12, "c1": 12, "c-1": 5}, {"c0": 30, "c1": 10, "c-1": 40}, [12, 4, 0, 0]),
        ({"c0": 4, "c-1": 4}, {"c-1": 8}, [0, 0, 0, 0]),
    ],
)
def test_by_hand(test, own, expected):
    assert drawn(labels(**test), labels(**own)) == expected
