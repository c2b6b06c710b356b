"""Axes of a sweep: one factor at a time, left out, replaced and resumed; and values that an experiment sweeps."""

import pytest

from fedssl.config.compose import resolve_config
from fedssl.errors import InputError
from simulation.axes import axes_of, expand_axes, with_experiment_values
from simulation.sweep import new_sweep_folder
from simulation.sweep_state import plan_jobs, split_options

REVIEW = ["experiment=review", "strategy=fedavg,fedu", "seed=0"]
BASE = ["partition.alpha=0.1", "experiment=review"]


def jobs_of(folder, *overrides):
    options, others = split_options(overrides)
    state = plan_jobs(folder, others, options)
    folder.mkdir(exist_ok=True)
    state.save(folder)
    return [list(job) for job in state.jobs.values()]


def test_an_experiment_sweeps_values_unless_they_are_given():
    assert with_experiment_values(["experiment=digits_conflict", "strategy=fedu"])[0] == "seed=0,1,2"
    assert with_experiment_values(["experiment=digits_conflict", "seed=5"]) == ["experiment=digits_conflict", "seed=5"]
    assert with_experiment_values(["seed=0,1"]) == ["seed=0,1"]
    given = with_experiment_values(["experiment=review", "partition=iid"])
    assert not any(override.startswith("partition.alpha") for override in given)


def test_experiments_are_swept(tmp_path):
    words = ["experiment=digits_conflict,digits_methods", "seed=0"]
    folder = new_sweep_folder([*words, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    jobs = jobs_of(folder, *words)
    assert jobs == [["experiment=digits_conflict", "seed=0"], ["experiment=digits_methods", "seed=0"]]


def test_one_factor_at_a_time(tmp_path):
    threshold = "strategy=fedu strategy.predictor_threshold=0.2,0.8"
    own = f'sweep.axes={{label_skew:["partition=iid"],parameter:["{threshold}"],clients:null}}'

    without = "sweep.without=[data,quantity_skew,feature_shift,encoder]"
    assert jobs_of(tmp_path / "sweep", *REVIEW, own, without) == [
        [*BASE, "strategy=fedavg", "seed=0"],
        [*BASE, "strategy=fedu", "seed=0"],
        ["experiment=review", "strategy=fedavg", "seed=0", "partition=iid"],
        ["experiment=review", "strategy=fedu", "seed=0", "partition=iid"],
        [*BASE, "seed=0", "strategy=fedu", "strategy.predictor_threshold=0.2"],
        [*BASE, "seed=0", "strategy=fedu", "strategy.predictor_threshold=0.8"],
    ]


def test_a_resumed_sweep_adds_the_axes_left_out(tmp_path):
    names = [*axes_of(["experiment=review"], {})]
    first = jobs_of(tmp_path, *REVIEW, f"sweep.without=[{','.join(names)}]")
    assert len(first) == 2
    assert jobs_of(tmp_path) == first
    names.remove("feature_shift")
    more = jobs_of(tmp_path, f"sweep.without=[{','.join(names)}]")
    assert more[:2] == first
    assert more[2:4] == [[*job, "feature_shift.noise=0.1"] for job in first]
    assert jobs_of(tmp_path, "seed=1")[: len(more)] == more


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("sweep.without=[dat]", r"sweep.without=\[dat\] names no axis; choose from data, label_skew"),
        ("sweep.axes={clients:5}", "no list of overrides for clients; write e.g."),
        ('sweep.axes={clients:["5"]}', "sweep.axes.clients has '5', which is not KEY=VALUE"),
        ('sweep.axes={clients:["partition=\'iid"]}', "sweep.axes.clients has .* cannot be split into words"),
        ('sweep.axes={clients:["clients=5"]}', "sweep.axes.clients: there is no setting 'clients'"),
    ],
)
def test_wrong_axes_are_refused(tmp_path, option, message):
    with pytest.raises(InputError, match=message):
        jobs_of(tmp_path / "sweep", *REVIEW, option)


def test_without_an_experiment_there_are_no_axes(tmp_path):
    with pytest.raises(InputError, match="this sweep has none, see experiment=review"):
        jobs_of(tmp_path / "sweep", "seed=0,1", "sweep.without=[data]")


def test_all_jobs_of_the_review_have_valid_settings():
    """Also those whose choice lacks a setting that the experiment has for its own, e.g. the width of the encoder."""
    jobs = expand_axes(with_experiment_values(["experiment=review", "strategy=fedavg", "seed=0"]), {})
    configs = [resolve_config(job)[0] for job in jobs]
    assert len(configs) == 29
    assert sum("width" not in config.encoder for config in configs) == 1
    assert sum("alpha" not in config.partition for config in configs) == 2
