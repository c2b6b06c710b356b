"""Figures of several runs: groups, steps, means over seeds, and the value that was swept, from folders made by hand."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedssl.plots.comparisons import evaluation_points, line_styles, mean_cosines, plot_accuracy
from fedssl.plots.forgetting import ClientForgetting, mean_forgetting
from fedssl.plots.registry import write_plot
from fedssl.report.cli import select_metrics
from fedssl.runs.costs import sum_costs
from fedssl.runs.groups import group_by_seed
from fedssl.runs.run import Run, find_runs, read_run
from tests.runs import change_summary, write_lines, write_run


def round_of(number: int, flops: float | None = 10.0, **knn: float) -> dict[str, Any]:
    line: dict[str, Any] = {"round": number, "clients": 2, "bytes_down": 60, "bytes_up": 40}
    line |= {"evaluation": knn} if knn else {}
    return line if flops is None else {**line, "cost": {"flops": flops, "peak_memory": 1.0}}


def made(folder: Path, *overrides: str, knn=0.5, lines=None, final=None) -> Run:
    """Return a run folder with these overrides; every client's cosine falls by 0.1 in each round."""
    write_run(folder, overrides, final={"federated": {"knn": knn}} if final is None else final)
    lines = [round_of(1, knn=knn - 0.1), round_of(2), round_of(3, knn=knn)] if lines is None else lines
    write_lines(folder / "metrics.jsonl", lines)
    pairs = [(round, client) for round in (1, 2) for client in (0, 1)]
    clients = [{"round": r, "client": client, "model_cosine": 1 - 0.1 * r - 0.02 * client} for r, client in pairs]
    write_lines(folder / "clients.jsonl", clients)
    (run,) = find_runs([folder])
    return run


@pytest.fixture
def sweep(tmp_path: Path) -> list[Run]:
    """Two rules and two values, one of them with two seeds."""
    jobs = [("fedavg", 0.1, 0, 0.5), ("fedavg", 0.5, 0, 0.6), ("fedavg", 0.5, 1, 0.8), ("l_dawa", 0.1, 0, 0.7)]
    return [
        made(tmp_path / str(n), f"strategy={strategy}", f"regularizer.weight={value}", f"seed={seed}", knn=knn)
        for n, (strategy, value, seed, knn) in enumerate(jobs)
    ]


def rows_of(file: Path) -> list[list[str]]:
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    with file.with_suffix(".csv").open(newline="") as stream:
        return list(csv.reader(stream))


FORMATS = {"formats": ("png", "pdf", "csv")}


def test_groups_are_runs_that_differ_in_the_seed_alone(sweep: list[Run]):
    found = group_by_seed(sweep)
    labels = [
        f"{name}, regularizer.weight={weight}" for name, weight in (("fedavg", 0.1), ("fedavg", 0.5), ("l_dawa", 0.1))
    ]
    assert [one.label for one in found] == labels
    assert [len(one.runs) for one in found] == [1, 2, 1]
    assert [(style["color"], style["marker"]) for style in line_styles(found)] == [
        ("#000000", "o"),
        ("#000000", "s"),
        ("#D55E00", "o"),
    ]


def test_unfinished_seeds_are_left_out_beside_finished_ones(sweep: list[Run]):
    for run, status in ((sweep[2], "failed"), (sweep[3], "interrupted")):
        change_summary(run.folder, status=status)
    runs = [read_run(run.folder) for run in sweep]
    assert [group.runs for group in group_by_seed(runs)] == [[runs[0]], [runs[1]], [runs[3]]]


def test_progress_by_hand():
    # (60 + 40) bytes / 2 clients = 50 a round.
    first, second = evaluation_points([round_of(1, knn=0.5), round_of(2), round_of(3, knn=0.6, other=0.1)])
    assert (first.round, first.bytes, first.flops, first.scores) == (1, 50, 10, {"knn": 0.5})
    assert (second.round, second.bytes, second.flops, second.scores) == (3, 150, 30, {"knn": 0.6, "other": 0.1})
    unmeasured = evaluation_points([round_of(1, knn=0.5), round_of(2, None, knn=0.5)])
    assert [step.flops for step in unmeasured] == [10, None]
    nats = {**round_of(1, nll=2.0), "units": {"nll": "nats"}}
    assert evaluation_points([nats]) == []


def test_bytes_with_base_layers_are_those_of_the_cost_table():
    lines = [{**round_of(n, knn=0.5), "seconds": 1.0} for n in (1, 2, 3)]
    lines[0] |= {"base": {"bytes": 40, "clients": 2}}
    lines[1] |= {"base": {"bytes": 10, "clients": 1}}
    points = evaluation_points(lines)
    # 40 / 2 + (60 - 40) / 2 + 40 / 2 = 50; with the second round (60 - 10) / 2 + 40 / 2 = 45 more, then 50.
    assert [point.bytes for point in points] == [50, 95, 145]
    assert [sum_costs(lines[:count]).communication for count in (1, 2, 3)] == [50, 95, 145]


def test_mean_cosines_by_hand(sweep: list[Run], tmp_path: Path):
    lines = [{"round": 2, "model_cosine": 0.5}, {"round": 1, "model_cosine": 0.9}, {"round": 1, "model_cosine": 0.7}]
    assert mean_cosines([*lines, {"round": 3, "model_cosine": None}]) == pytest.approx({1: 0.8, 2: 0.5})
    _, *rows = rows_of(write_plot("divergence", sweep, tmp_path, **FORMATS))
    assert len(rows) == 6
    assert [float(row[2]) for row in rows[:2]] == pytest.approx([0.89, 0.79])
    (sweep[1].folder / "clients.jsonl").write_text("")  # before its first round, as is the only run of l_dawa
    (sweep[3].folder / "clients.jsonl").write_text("")
    _, *fewer = rows_of(write_plot("divergence", sweep, tmp_path, **FORMATS))
    assert [row[:3] for row in fewer] == [row[:3] for row in rows[:4]]
    assert {row[3] for row in fewer} == {""}  # one run has no deviation


def test_forgetting_by_hand():
    # Round 1: 0.8 - 0.6 = 0.2 and 0.5 - 0.5 = 0: mean 0.1, deviation sqrt(2 x 0.1^2). Round 3: 0.4 - 0.5 = -0.1.
    rest = {"local_all": 0.0, "global_all": 0.0}
    found = [
        ClientForgetting(round=3, client=0, local_matched=0.4, global_matched=0.5, **rest),
        ClientForgetting(round=1, client=0, local_matched=0.8, global_matched=0.6, **rest),
        ClientForgetting(round=1, client=1, local_matched=0.5, global_matched=0.5, **rest),
    ]
    means = mean_forgetting(found)
    assert list(means) == [1, 3]
    assert means[1] == pytest.approx((0.1, 0.02**0.5))
    assert means[3] == (pytest.approx(-0.1), None)


def test_accuracy_of_selected_results(tmp_path: Path):
    """kNN is known in rounds 1 and 3, and linear at the end only."""
    final = {"untrained": {"knn": 0.2, "linear": 0.3}, "federated": {"knn": 0.5, "linear": 0.8}}
    run = made(tmp_path / "run", final=final)
    for name, expected in (("knn", [0, 1, 3]), ("linear", [0, 3])):
        (selected,) = select_metrics([run], [name])
        _, *rows = rows_of(write_plot("accuracy", [selected], tmp_path, **FORMATS))
        assert [(row[1], int(row[2])) for row in rows] == [(name, round) for round in expected]


def test_results_of_another_protocol_are_not_in_the_figure(tmp_path: Path):
    """With k=1 in the rounds and k=40 at the end, the end does not extend the curve; without rounds it is the curve."""
    knn, other = ({"_target_": "fedssl.evaluation.knn.KNN", "k": k} for k in (1, 40))
    final = {"federated": {"knn": 0.5}, "untrained": {"knn": 0.2}, "pixels": {"knn": 0.3}}
    in_rounds, at_the_end = [round_of(1, knn=0.4), round_of(2)], [round_of(1), round_of(2)]
    cases = [
        (knn, in_rounds, [0, 1, 2], 2),
        ({"protocols": {"linear": {"c": 1}, "any": knn}}, in_rounds, [0, 1, 2], 2),  # has that of the rounds
        (other, in_rounds, [1], 0),
        (other, at_the_end, [0, 2], 2),
    ]
    for number, (protocol, lines, rounds, baselines) in enumerate(cases):
        run = replace(
            made(tmp_path / str(number), "strategy=eua", lines=lines, final=final),
            settings={"evaluation": knn, "final_evaluation": protocol},
        )
        data = plot_accuracy([run])
        assert [row[2] for row in list(data.rows)[1:]] == rounds
        assert len(data.figure.legends[0].get_texts()) == 1 + baselines


def test_baselines_are_lines_in_gray_or_the_color_of_runs(tmp_path: Path):
    final = {"untrained": {"knn": 0.2}, "federated": {"knn": 0.5}, "pixels": {"knn": 0.3}}
    other = {**final, "untrained": {"knn": 0.4}}
    runs = [
        made(tmp_path / "a0", "strategy=l_dawa", "seed=0", final=final),
        made(tmp_path / "a1", "strategy=l_dawa", "seed=1", final=other),
        made(tmp_path / "b", "strategy=fedavg", final=final),
        made(tmp_path / "c", "strategy=eua"),
    ]

    def lines(runs: list[Run]) -> set[tuple[str, float, str]]:
        data = plot_accuracy(runs)
        axes = [axis.lines for axis in data.figure.axes]
        constant = [[x for x in of if len({*x.get_ydata()}) == 1] for of in axes]
        found = [{(x.get_linestyle(), x.get_ydata()[0], x.get_color()) for x in of} for of in constant]
        assert found == [found[0]] * 3  # over rounds, bytes and FLOPs
        shown = [text.get_text() for text in data.figure.legends[0].get_texts()]
        assert ("raw pixels" in shown) == ("untrained encoder" in shown) == bool(found[0])
        return {(style, round(value, 9), color) for style, value, color in found[0]}

    # Pixels are the same for all; the untrained encoder has (20 + 40) / 2 = 30% of l_dawa's seeds and 20% of fedavg's.
    l_dawa, fedavg = "#D55E00", "#000000"
    assert lines(runs) == {("--", 30, l_dawa), ("--", 20, fedavg), (":", 30, "0.5")}
    assert lines([runs[0], runs[2]]) == {("--", 20, "0.5"), (":", 30, "0.5")}
    assert lines(runs[3:]) == set()
