"""Figures over the settings of a sweep: the value that was swept, means over seeds, and cells by hand."""

from pathlib import Path

import numpy as np
import pytest

from fedssl.errors import InputError
from fedssl.plots.registry import write_plot
from fedssl.plots.swept import final_scores, read_sweep
from fedssl.runs.run import Run
from tests.fedssl.plots.test_comparisons import FORMATS, made, rows_of, sweep

__all__ = ["sweep"]  # a fixture


def test_sensitivity(sweep: list[Run], tmp_path: Path):
    found = read_sweep(sweep, 1, plot="", what="", example="")
    assert found.keys == ["regularizer.weight"]
    scores = final_scores(found.groups["fedavg"], found.keys, "knn")
    assert scores == [(0.1, 0.5, None, 1), (0.5, pytest.approx(0.7), pytest.approx(0.02**0.5), 2)]
    header, *rows = rows_of(write_plot("sensitivity", sweep, tmp_path, **FORMATS))
    assert header == ["run", "protocol", "regularizer.weight", "accuracy", "deviation", "runs"]
    found = [(row[0], row[2], row[5]) for row in rows]
    assert found == [("fedavg", "0.1", "1"), ("fedavg", "0.5", "2"), ("l_dawa", "0.1", "1")]


def test_heatmap(tmp_path: Path):
    jobs = [(0.1, 5, 0, 0.5), (0.1, 10, 0, 0.6), (1, 10, 0, 0.6), (1, 10, 1, 0.8)]  # without alpha 1 and 5 clients
    runs = [
        made(tmp_path / f"{n}", f"partition.alpha={alpha}", f"num_clients={clients}", f"seed={seed}", knn=knn)
        for n, (alpha, clients, seed, knn) in enumerate(jobs)
    ]
    header, *rows = rows_of(write_plot("heatmap", runs, tmp_path, **FORMATS))
    assert header == ["run", "protocol", "partition.alpha", "num_clients", "accuracy", "deviation", "runs"]
    numbers = [[float(cell or "nan") for cell in row[2:]] for row in rows]
    expected = [[0.1, 5, 0.5, np.nan, 1], [0.1, 10, 0.6, np.nan, 1], [1, 10, 0.7, 0.02**0.5, 2]]
    np.testing.assert_allclose(numbers, expected)
    with pytest.raises(InputError, match=r"heatmap needs .*, and 1 do \(num_clients\); give"):
        write_plot("heatmap", runs[:2], tmp_path)
