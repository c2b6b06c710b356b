"""The table beside the figure of a partition."""

import csv
import io

import numpy as np
import torch

from fedssl.plots.partition import partition_table


def test_table_counts_by_hand() -> None:
    parts = [np.array([0, 1, 4]), np.array([2, 3])]
    labels = torch.tensor([0, 0, 2, 2, 2])
    rows = list(csv.reader(io.StringIO(partition_table(parts, (labels, ("cat", "dog, wet", "owl"))), newline="")))
    assert rows[0] == ["client", "examples", "cat", "dog, wet", "owl"]
    assert rows[1:] == [["0", "3", "2", "0", "1"], ["1", "2", "0", "0", "2"]]
    assert partition_table(parts, (labels, ())).splitlines()[:2] == ["client,examples,0,1,2", "0,3,2,0,1"]
    assert partition_table(parts, (None, ())).splitlines() == ["client,examples", "0,3", "1,2"]
