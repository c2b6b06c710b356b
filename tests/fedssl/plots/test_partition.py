"""The table beside the figure of a partition."""

import csv
import io
from pathlib import Path

import numpy as np
import torch

from fedssl.plots.partition import partition_table, plot_partition


def test_table_counts_by_hand() -> None:
    parts = [np.array([0, 1, 4]), np.array([2, 3])]
    labels = torch.tensor([0, 0, 2, 2, 2])
    rows = list(csv.reader(io.StringIO(partition_table(parts, (labels, ("cat", "dog, wet", "owl"))), newline="")))
    assert rows[0] == ["client", "examples", "cat", "dog, wet", "owl"]
    assert rows[1:] == [["0", "3", "2", "0", "1"], ["1", "2", "0", "0", "2"]]
    assert partition_table(parts, (labels, ())).splitlines()[:2] == ["client,examples,0,1,2", "0,3,2,0,1"]
    assert partition_table(parts, (None, ())).splitlines() == ["client,examples", "0,3", "1,2"]


def test_clients_without_images_have_a_figure(tmp_path: Path) -> None:
    (tmp_path / "partition.csv").write_text("client,examples\n0,0\n1,0\n")
    data = plot_partition(tmp_path)
    assert data is not None
    assert list(data.rows) == [["client", "examples"], [0, 0], [1, 0]]


def test_long_names_of_classes_leave_room_for_the_bars(tmp_path: Path) -> None:
    names = ["a_name_without_any_space_" * 6, "several words that describe the class " * 4]
    (tmp_path / "partition.csv").write_text(partition_table([np.arange(4)], (torch.tensor([0, 1, 1, 0]), names)))
    data = plot_partition(tmp_path)
    assert data is not None
    data.figure.draw_without_rendering()
    assert data.figure.axes[0].get_position().width > 0.5
    labels = [text.get_text() for text in data.figure.legends[0].get_texts()]
    assert labels[0].startswith("a_name_without")
    assert labels[1].endswith("…")
    assert next(iter(data.rows)) == ["client", *names]
