"""Critical-difference diagrams: Demsar's numbers, blocks, and bars."""

from pathlib import Path

import pytest

from fedssl.errors import InputError
from fedssl.plots.ranks import cliques, complete_blocks, critical_difference
from fedssl.plots.registry import write_plot
from tests.fedssl.plots.test_comparisons import FORMATS, made, rows_of


def test_critical_differences_are_those_of_demsar():
    """Table 5a has q = 1.960, 2.569 and 3.164; section 3.2.2 has 1.25 for four classifiers on 14 data sets."""
    assert critical_difference(2, 1) == pytest.approx(1.960, abs=5e-4)  # sqrt(2 * 3 / 6) = 1
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=5e-3)
    assert critical_difference(10, 10) == pytest.approx(3.164 * (110 / 60) ** 0.5, abs=1e-3)


def test_bars_are_the_longest_groups_within_the_difference():
    assert cliques([1.0, 1.5, 2.4, 4.0], 1.0) == [(0, 1), (1, 2)]
    assert cliques([1.0, 1.5, 1.9, 4.0], 1.0) == [(0, 2)]
    assert cliques([1.0, 3.0], 1.0) == []


def test_blocks_have_all_strategies_and_common_seeds():
    table = {
        "iid": {"a": {"0": 0.5, "1": 0.7}, "b": {"0": 0.6, "1": 0.6, "2": 0.9}},
        "skew": {"a": {"0": 0.2}, "b": {"0": 0.3}},
        "failed": {"a": {"0": 0.2}},
        "parameter": {"a, x=1": {"0": 0.2}},
    }
    assert complete_blocks(table) == {"a": pytest.approx([0.6, 0.2]), "b": pytest.approx([0.6, 0.3])}
    assert complete_blocks({"iid": table["iid"]}) == {"a": [0.5, 0.7], "b": [0.6, 0.6]}  # seeds


def test_ranks_over_scenarios(tmp_path: Path):
    accuracies = {"fedavg": (0.9, 0.6), "l_dawa": (0.7, 0.5), "fedu": (0.8, 0.7)}  # with alpha 0.1 and 1
    jobs = [(name, alpha, each[i]) for name, each in accuracies.items() for i, alpha in enumerate((0.1, 1))]
    runs = [
        made(
            tmp_path / f"{name}{alpha}{seed}",
            *(f"strategy={name}", f"partition.alpha={alpha}", f"seed={seed}"),
            *(["regularizer=prox"] if name == "fedu" else ["strategy.weighting=examples"]),
            knn=knn,
        )
        for name, alpha, knn in jobs
        for seed in (0, 1)
    ]
    _, *rows = rows_of(write_plot("critical_difference", runs, tmp_path, **FORMATS))
    assert [(row[1], float(row[2]), row[3]) for row in rows] == [
        ("fedavg", 1.5, "2"),  # first and second
        ("fedu, regularizer=prox", 1.5, "2"),
        ("l_dawa", 3.0, "2"),
    ]
    # Friedman: 12 / (2 * 3 * 4) * (3^2 + 3^2 + 6^2) - 3 * 2 * 4 = 3, and exp(-3 / 2) with two degrees of freedom.
    assert float(rows[0][5]) == pytest.approx(0.2231, abs=1e-4)
    with pytest.raises(InputError, match="needs three strategies"):
        write_plot("critical_difference", runs[:8], tmp_path)
