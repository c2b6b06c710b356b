"""The cost of a run is counted and measured in parts, which are multiplied."""

from dataclasses import replace

import pytest

from fedssl.config.load import compose
from fedssl.errors import InputError
from server_app.updates import RoundResult
from simulation import cost as estimation
from simulation.cost import Measurement, choose_engine, compose_cost, estimate_cost, measure
from simulation.resources import RAY_OVERHEAD_SECONDS, EngineChoice
from tests.planning import QUICK, build
from tests.simulation.test_round_counts import UPDATE

TIMES = {"aggregation": 0.125, "evaluation": 4.0, "end": 5.0}
MEASURED = Measurement(steps={1: 0.25}, update=UPDATE, server_memory=1200, worker_memory=300, **TIMES)
LOCAL = EngineChoice("local", 1, "")


class TestComposeCost:
    """Three clients of 20 images with batches of 8: 3 steps. A round trains 3 * 3 / 4 = 2.25 s."""

    @pytest.fixture
    def overrides(self):
        return [*QUICK, "partition=iid", "batch_size=8", "rounds=2", "evaluate_every=2"]

    def test_one_process(self, overrides, tmp_path):
        """Updates 0.375 s. Round 2 is evaluated: 4 s. Final: three times."""
        cost = compose_cost(build(overrides, tmp_path), MEASURED, LOCAL, build=2.0)
        assert cost.round_seconds == [2.625, 6.625]
        assert cost.seconds == 2 + 2.625 + 6.625 + 15
        assert (cost.memory, cost.worker_memory) == (1200, 0)
        assert cost.steps == 2 * 9

    def test_ray(self, overrides, tmp_path):
        """Two of three clients at once: two turns of 0.75 s."""
        components = build([*overrides, "evaluate_every=0"], tmp_path)
        cost = compose_cost(components, MEASURED, EngineChoice("ray", 2, ""), build=0.0)
        assert cost.round_seconds == 2 * [2 * 0.75 + 0.375]
        assert cost.seconds == 2 * 1.875 + 15 + RAY_OVERHEAD_SECONDS
        assert cost.memory == 1200 + 2 * 300

    def test_every_phase_has_its_steps(self, tmp_path):
        components = build([*QUICK, "schedule=progressive", "partition=iid"], tmp_path)
        measured = replace(MEASURED, steps={phase: float(phase) for phase in range(1, 5)})
        cost = compose_cost(components, measured, LOCAL, build=0.0)
        assert cost.round_seconds == [3 * 0.125 + 3 * phase for phase in (1, 2, 3, 4)]

    def test_every_model_is_evaluated(self, overrides, tmp_path):
        cost = compose_cost(build([*overrides, "strategy=local_only"], tmp_path), MEASURED, LOCAL, build=0.0)
        models = cost.rounds[-1].models
        assert models > 3
        assert cost.round_seconds[1] - cost.round_seconds[0] == 4 * models
        assert cost.seconds == sum(cost.round_seconds) + 5 * (models + 2)

    def test_the_training_of_the_server(self, overrides, tmp_path):
        """Two epochs of round(0.29 * 100) = 29 images: 9 batches of at least the 3 images that SimSiam needs."""
        overrides = [*overrides, "evaluate_every=0", "method=simsiam", "batch_size=3"]
        calibration = ["calibration=auxiliary", "calibration.epochs=2", "calibration.share=0.29"]
        settings = compose([*overrides, *calibration, "calibration.dataset=${dataset}"]).calibration
        components = build(overrides, tmp_path)
        with_server = compose_cost(components, MEASURED, LOCAL, build=0.0, calibration=settings)
        without = compose_cost(components, MEASURED, LOCAL, build=0.0)
        assert with_server.round_seconds[0] - without.round_seconds[0] == 2 * 9 * 0.25


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=deployment"], "plan=true cannot estimate engine=deployment, .*; set engine=auto"),
        (["engine=ray", "engine.address=auto"], "on this machine; leave out engine.address"),
        (["secure_aggregation=secagg_plus"], "cannot estimate the messages of secure_aggregation; set"),
        (["pause_after=2"], "plan=true estimates a complete run; leave out pause_after"),
        (["device=cpu", "cuda_graphs=true", "optimizer.fused=true"], "cuda_graphs=true needs device=cuda"),
        (["engine=ray", "engine.client_cpus=9999"], "engine.client_cpus=9999 must be a whole number from 1 to"),
        (["clients_per_round=9"], "clients_per_round=9 is more than num_clients=5"),
    ],
)
def test_runs_without_an_estimate(overrides, message):
    with pytest.raises(InputError, match=message):
        estimate_cost([*QUICK, *overrides])


def test_engine_of_an_estimate(monkeypatch):
    monkeypatch.setattr("simulation.resources.available_cores", lambda: 8)
    settings = compose([*QUICK, "engine=ray", "threads=2", "clients_per_round=5"])
    assert choose_engine(settings).concurrency == 4
    assert choose_engine(compose([*QUICK, "engine=ray", "engine.client_cpus=8"])).concurrency == 1
    assert choose_engine(compose([*QUICK, "engine=local"])) == LOCAL
    # The memory of the measurement must not change the choice.
    monkeypatch.setattr("simulation.cost.auto_engine", lambda settings: EngineChoice("ray", 2, "reason"))
    assert choose_engine(compose([*QUICK, "engine=auto"])) == EngineChoice("ray", 2, "reason")


@pytest.fixture
def short_measurements(monkeypatch):
    monkeypatch.setattr(estimation, "MAX_STEPS", 2)


@pytest.mark.parametrize("strategy", ["krum", "gossip"])
def test_all_parts_of_a_run(tmp_path, short_measurements, strategy):
    overrides = ["evaluate_every=1", "collapse_images=16", "final_evaluation=knn", f"strategy={strategy}"]
    components = build([*QUICK, "clients_per_round=5", *overrides], tmp_path)
    measured = measure(components, separate_workers=True)
    for name in ("aggregation", "evaluation", "end", "worker_memory"):
        assert getattr(measured, name) > 0, name
    assert measured.steps[1] > 0
    assert measured.update.state_rounds == (0, 0)
    assert not list(tmp_path.iterdir())


def test_few_updates_of_a_large_round_are_measured(tmp_path, short_measurements, monkeypatch):
    """A round needs more updates than are measured, of which two have factors below the rank of the model."""
    monkeypatch.setattr(estimation, "MAX_UPDATES", 2)
    overrides = ["tuning=lora", "tuning.rank=4", "tuning.ranks=[1,2]", "tuning.aggregation=svd"]
    components = build([*QUICK, *overrides, "aggregation.min_updates=3"], tmp_path)
    dropped = []
    monkeypatch.setattr(RoundResult, "drop", lambda self, client, reason: dropped.append(reason))
    assert measure(components, separate_workers=False).aggregation > 0
    assert not dropped


def test_steps_of_a_client_do_not_diverge(tmp_path, short_measurements):
    """VICReg on 4 images, with LoRA, whose base layers a client stores; BYOL's clients have a state."""
    small = ["method=vicreg", "batch_size=4", "tuning=lora", "tuning.rank=2", "optimizer.lr=10"]
    assert measure(build([*QUICK, *small], tmp_path), separate_workers=False).steps[1] > 0
    measured = measure(build([*QUICK, "method=byol", "schedule=layer_wise"], tmp_path), separate_workers=False)
    assert (measured.update.state_rounds[1], list(measured.steps)) == (4, [1, 2, 3, 4])
    assert not list(tmp_path.iterdir())
