"""The trade-off between two data sets: its points by hand, its file, and a run that logs both in every round."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from fedssl.config.load import compose
from fedssl.datasets.base import load_split
from fedssl.plots.comparisons import accuracies_by_round, mean_points
from fedssl.plots.registry import write_plot
from fedssl.runs.run import Run, find_runs
from simulation.run import run
from tests.runs import read_lines, read_summary, write_lines, write_run

PAIR = ("knn", "knn@source")


def made(folder: Path, *overrides: str, rounds: dict[int, tuple[float, float]], first=(0.2, 0.9)) -> Run:
    untrained = dict(zip(PAIR, first, strict=True)) if first else {}
    final = {"federated": {"knn": 0.5}, "untrained": untrained, "pixels": {"knn": 0.1}}
    write_run(folder, overrides, final=final)
    lines = [
        {"round": round, "clients": 2, "loss": 1.0, "evaluation": {**dict(zip(PAIR, values, strict=True)), "rank": 7.0}}
        | {"units": {"rank": ""}}
        for round, values in rounds.items()
    ]
    write_lines(folder / "metrics.jsonl", lines)
    (found,) = find_runs([folder])
    return found


def test_points_by_hand(tmp_path: Path) -> None:
    """Round 1: 0.4 and 0.6 have the mean 0.5 and the deviation sqrt(2 x 0.1^2). Only the first run has round 2."""
    runs = [made(tmp_path / "0", rounds={1: (0.4, 0.8), 2: (0.5, 0.7)})]
    runs += [made(tmp_path / "1", rounds={1: (0.6, 0.8), 3: (0.9, 0.1)}, first=(0.4, 0.9))]
    values = [accuracies_by_round(run) for run in runs]
    expected = [(0.2, 0.9), (0.4, 0.8), (0.5, 0.7)]
    assert values[0] == {seed: {"knn": one, "knn@source": other} for seed, (one, other) in enumerate(expected)}
    points = mean_points(values, PAIR)
    np.testing.assert_allclose(points, [(0, 0.3, 0.02**0.5, 0.9, 0), (1, 0.5, 0.02**0.5, 0.8, 0)], atol=1e-12)
    assert mean_points([*values, {1: {"knn": 0.9}}], PAIR) == points  # of a run that was not evaluated on both
    differing = replace(runs[0], settings={"evaluation": {"k": 1}, "final_evaluation": {"k": 40}})
    assert list(accuracies_by_round(differing)) == [1, 2]


def test_the_file_has_a_line_for_each_group_and_round(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / "a0", "strategy=fedavg", "seed=0", rounds={1: (0.4, 0.8)}),
        made(tmp_path / "a1", "strategy=fedavg", "seed=1", rounds={1: (0.6, 0.6)}),
        made(tmp_path / "b0", "strategy=fedbn", "seed=0", rounds={1: (0.3, 0.9)}, first=None),
    ]
    file = write_plot("tradeoff", runs, tmp_path, formats=("png", "csv"))
    assert file == tmp_path / "figures" / "tradeoff.png"
    with file.with_suffix(".csv").open(newline="") as stream:
        header, *rows = csv.reader(stream)
    assert header == ["run", "round", "own", "own deviation", "other", "accuracy", "deviation"]
    found = [[*row[:2], row[4]] for row in rows]
    assert found == [[name, alpha, "knn@source"] for name, alpha in (("fedavg", "0"), ("fedavg", "1"), ("fedbn", "1"))]
    numbers = [[float(row[index] or "nan") for index in (2, 3, 5, 6)] for row in rows]
    deviation = 0.02**0.5  # of 0.4 and 0.6; one run has none
    expected = [[0.2, 0, 0.9, 0], [0.5, deviation, 0.7, deviation], [0.3, np.nan, 0.9, np.nan]]
    np.testing.assert_allclose(numbers, expected, atol=1e-12)


def save_turned_digits(folder: Path) -> None:
    """Digits turned by 90 degrees with inverted gray levels, as folders of classes for training and test."""
    for split in ("train", "test"):
        data = load_split(compose([]).data, split)
        for label in range(10):
            rows = (data.labels == label).nonzero().flatten()[:12]
            (folder / split / str(label)).mkdir(parents=True)
            for number, image in enumerate(data.images[rows]):
                pixels = 255 - np.rot90(image[0].numpy())
                Image.fromarray(np.ascontiguousarray(pixels)).save(folder / split / str(label) / f"{number}.png")


def test_a_run_logs_both_accuracies_in_every_round(tmp_path: Path) -> None:
    save_turned_digits(tmp_path / "turned")
    words = ["num_clients=2", "rounds=2", "local_epochs=1", "dataset.limit=90", "encoder.width=4", "threads=1"]
    words += ["evaluate_every=1", "collapse_images=0", "measure_resources=false", "strategy=fedavg"]
    for group in ("evaluation", "final_evaluation"):
        words += [f"{group}=domains", f"+dataset@{group}.datasets.turned=folder"]
        words += [f"{group}.datasets.turned.path={tmp_path / 'turned'}", f"{group}.datasets.turned.channels=1"]
        words += [f"{group}.datasets.turned.mean=[0.3]", f"{group}.datasets.turned.std=[0.4]"]
    run([*words, f"output_dir={tmp_path / 'run'}"])
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [set(line["evaluation"]) for line in lines] == [{"knn", "knn@turned"}] * 2
    final = read_summary(tmp_path / "run")["final"]
    assert final["federated"] == lines[-1]["evaluation"]
    assert set(accuracies_by_round(*find_runs([tmp_path / "run"]))) == {0, 1, 2}
    assert write_plot("tradeoff", find_runs([tmp_path / "run"]), tmp_path) is not None
