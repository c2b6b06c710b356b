"""Seconds and memory of an estimate are measured parts, multiplied."""

from dataclasses import replace

import pytest

from fedssl.config.load import compose
from fedssl.errors import InputError
from simulation.cost_estimate import choose_engine, compose_cost, estimate_cost
from simulation.cost_measurement import Measurement
from simulation.resources import RAY_OVERHEAD_SECONDS, EngineChoice
from tests.planning import QUICK, build

MEASURED = Measurement(
    client=0.5,
    steps={1: 0.25},
    update=0.125,
    observation=1.0,
    evaluation=4.0,
    final_evaluation=5.0,
    figures=0.5,
    server_memory=1200,
    worker_memory=300,
    saves_state=False,
)
LOCAL = EngineChoice("local", 1, "")


class TestComposeCost:
    """Three clients of 20 images with batches of 8: 3 steps. A round trains 3 (0.5 + 3 / 4) = 3.75 s."""

    @pytest.fixture
    def overrides(self):
        return [*QUICK, "partition=iid", "batch_size=8", "rounds=2", "evaluate_every=2"]

    def test_one_process(self, overrides, tmp_path):
        """Updates 0.375 s. Round 2 is evaluated: 1 s for each of 4 models and 4 s. Final: three times, a figure."""
        cost = compose_cost(build(overrides, tmp_path), MEASURED, LOCAL, build=2.0)
        assert cost.round_seconds == [4.125, 12.125]
        assert cost.seconds == 2 + 4.125 + 12.125 + 15.5
        assert (cost.memory, cost.worker_memory) == (1200, 0)
        assert cost.steps == 2 * 9

    @pytest.mark.parametrize(("evaluation", "first"), [(9.0, 9.0), (3.0, 8.125)])
    def test_evaluation_beside_the_next_round(self, overrides, tmp_path, monkeypatch, evaluation, first):
        """Training, updates and collapse 8.125 s. The evaluation of the last round is waited for."""
        monkeypatch.setattr("simulation.cost_estimate.can_evaluate_in_background", lambda components, cores: True)
        measured = replace(MEASURED, evaluation=evaluation)
        cost = compose_cost(build([*overrides, "evaluate_every=1"], tmp_path), measured, LOCAL, build=0.0)
        assert cost.round_seconds == [first, 8.125 + evaluation]

    def test_ray(self, overrides, tmp_path):
        """Two of three clients at once: two turns of 1.25 s."""
        components = build([*overrides, "evaluate_every=0"], tmp_path)
        cost = compose_cost(components, MEASURED, EngineChoice("ray", 2, ""), build=0.0)
        assert cost.round_seconds == 2 * [2 * 1.25 + 0.375]
        assert cost.seconds == 2 * 2.875 + 15.5 + RAY_OVERHEAD_SECONDS
        assert cost.memory == 1200 + 2 * 300

    def test_every_phase_has_its_steps(self, tmp_path):
        components = build([*QUICK, "schedule=progressive", "partition=iid"], tmp_path)
        measured = replace(MEASURED, steps={phase: float(phase) for phase in range(1, 5)})
        cost = compose_cost(components, measured, LOCAL, build=0.0)
        assert cost.round_seconds == [3 * (0.5 + 0.125) + 3 * phase for phase in (1, 2, 3, 4)]

    def test_every_model_is_evaluated(self, overrides, tmp_path):
        cost = compose_cost(build([*overrides, "strategy=local_only"], tmp_path), MEASURED, LOCAL, build=0.0)
        models = cost.rounds[-1].models
        assert models > 3
        assert cost.round_seconds[1] - cost.round_seconds[0] == 4 * models + 3 + models
        assert cost.seconds == sum(cost.round_seconds) + 5 * (models + 2) + 0.5

    def test_the_training_of_the_server(self, overrides, tmp_path):
        """A calibration of 2 epochs with the server's fifth of 100 images: 3 batches of 8."""
        calibration = ["calibration=auxiliary", "calibration.epochs=2", "calibration.share=0.2", "evaluate_every=0"]
        calibration += ["calibration.dataset=${dataset}"]
        settings = compose([*overrides, *calibration]).calibration
        components = build([*overrides, "evaluate_every=0"], tmp_path)
        with_server = compose_cost(components, MEASURED, LOCAL, build=0.0, calibration=settings)
        without = compose_cost(components, MEASURED, LOCAL, build=0.0)
        steps = 2 * -(-int(len(components.client_data.image_data.images) * settings.share) // 8)
        assert with_server.round_seconds[0] - without.round_seconds[0] == steps * 0.25


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
    monkeypatch.setattr("simulation.cost_estimate.available_cores", lambda: 8)
    settings = compose([*QUICK, "engine=ray", "threads=2", "clients_per_round=5"])
    assert choose_engine(settings).concurrency == 4
    assert choose_engine(compose([*QUICK, "engine=ray", "engine.client_cpus=8"])).concurrency == 1
    assert choose_engine(compose([*QUICK, "engine=local"])) == LOCAL
    # The memory of the measurement must not change the choice.
    monkeypatch.setattr("simulation.cost_estimate.auto_engine", lambda settings: EngineChoice("ray", 2, "reason"))
    assert choose_engine(compose([*QUICK, "engine=auto"])) == EngineChoice("ray", 2, "reason")
