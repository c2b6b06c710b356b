"""The same settings and seed give the same results on both engines."""

import json
from contextlib import nullcontext

import pytest

from server_app.checkpoint import latest_checkpoint
from simulation.run import run
from tests.busy import busy_machine
from tests.runs import model_bits, read_lines, read_summary

# BYOL has client state, stages are frozen, and two of three clients train in a round, so that the sampling matters.
WORDS = ["num_clients=3", "clients_per_round=2", "rounds=5", "local_epochs=1", "dataset.limit=60", "encoder.width=4"]
WORDS += ["threads=1", "method=byol", "evaluate_every=2", "final_evaluation=knn"]
STAGES = ["strategy=l_dawa", "schedule=layer_wise", "regularizer=alignment", "calibration=auxiliary"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "beside"),
    [
        (STAGES, nullcontext),
        pytest.param(
            ["num_clients=10", "clients_per_round=9", "dataset.limit=200"], nullcontext, marks=pytest.mark.heavy
        ),
        *(
            pytest.param([f"strategy={name}", "evaluate_personalized=true"], beside, marks=pytest.mark.heavy)
            for name, beside in {
                "featarc": busy_machine,
                **dict.fromkeys(("clustered", "gossip", "per_ssl"), nullcontext),
            }.items()
        ),
    ],
)
def test_local_and_ray_are_bit_identical(tmp_path, overrides, beside):
    run([*WORDS, *overrides, "engine=local", f"output_dir={tmp_path / 'local'}"])
    with beside():
        run([*WORDS, *overrides, "engine=ray", f"output_dir={tmp_path / 'ray'}"])
    local, ray = (latest_checkpoint(tmp_path / engine / "checkpoints") for engine in ("local", "ray"))
    assert local.strategy_state == ray.strategy_state
    assert model_bits(tmp_path / "local") == model_bits(tmp_path / "ray")
    for file in ("metrics.jsonl", "clients.jsonl"):
        for one, other in zip(read_lines(tmp_path / "local" / file), read_lines(tmp_path / "ray" / file), strict=True):
            # Messages contain the path of the folder, and times differ.
            rest = {"seconds": 0, "client_seconds": 0, "bytes_down": 0}
            assert one | rest == other | rest
    finals = [read_summary(tmp_path / engine)["final"] for engine in ("local", "ray")]
    assert finals[0] == finals[1]
    if "evaluate_personalized=true" in overrides:
        own = [json.loads((tmp_path / engine / "personalized.json").read_text()) for engine in ("local", "ray")]
        assert own[0] == own[1]
    assert (tmp_path / "local" / "partition.csv").read_text() == (tmp_path / "ray" / "partition.csv").read_text()
