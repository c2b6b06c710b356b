"""The command ``fedssl`` with a run to resume."""

import pytest

from fedssl.errors import InputError
from simulation.cli import run

QUICK = ["num_clients=3", "local_epochs=1", "dataset.limit=60", "encoder.width=4", "threads=1"]
QUICK += ["evaluate_every=0", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]


def test_only_a_run_without_phases_can_change_its_length(tmp_path):
    """The phase of a round depends on the number of rounds."""
    for name, schedule in (("staged", "layer_wise"), ("whole", "end_to_end")):
        run([*QUICK, "rounds=4", f"schedule={schedule}", f"output_dir={tmp_path / name}"])
    with pytest.raises(InputError, match=r"was run with rounds=4 \(now 5\); keep the number") as caught:
        run([f"resume={tmp_path / 'staged'}", "rounds=5"])
    assert "\n" not in str(caught.value)
    run([f"resume={tmp_path / 'whole'}", "rounds=5"])
