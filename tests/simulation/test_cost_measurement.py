"""The parts of a run are measured without writing anything."""

import pytest

from simulation import cost_measurement
from simulation.cost_measurement import measure
from tests.planning import QUICK, build


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr(cost_measurement, "STEP_SECONDS", 0.05)


@pytest.mark.parametrize("strategy", ["krum", "gossip"])
def test_all_parts_of_a_run(tmp_path, strategy):
    overrides = ["evaluate_every=1", "collapse_images=16", "final_evaluation=knn", f"strategy={strategy}"]
    components = build([*QUICK, "clients_per_round=5", *overrides], tmp_path)
    measured = measure(components, separate_workers=True)
    for name in ("update", "observation", "evaluation", "final_evaluation", "figures", "worker_memory"):
        assert getattr(measured, name) > 0, name
    assert measured.steps[1] > 0
    assert not measured.saves_state
    assert not list(tmp_path.iterdir())


def test_many_steps_of_a_client_do_not_diverge(tmp_path):
    """VICReg on 4 images, with LoRA, whose base layers a client stores; BYOL's clients have a state."""
    small = ["method=vicreg", "batch_size=4", "tuning=lora", "tuning.rank=2", "optimizer.lr=10"]
    assert measure(build([*QUICK, *small], tmp_path), separate_workers=False).steps[1] > 0
    measured = measure(build([*QUICK, "method=byol", "schedule=layer_wise"], tmp_path), separate_workers=False)
    assert (measured.saves_state, list(measured.steps)) == (True, [1, 2, 3, 4])
    assert not list(tmp_path.iterdir())
