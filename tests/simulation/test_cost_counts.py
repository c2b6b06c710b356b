"""Steps and bytes of an estimate equal those of the run."""

import json

import pytest

from simulation.cost_counts import count_rounds
from simulation.run import run
from tests.planning import QUICK, build


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=orchestra", "wire_dtype=int8"],  # a server side, and differences
        pytest.param(["method=byol", "strategy=fedu", "wire_dtype=fp16"], marks=pytest.mark.heavy),  # parts, a state
        pytest.param(["schedule=layer_wise", "method=byol"], marks=pytest.mark.heavy),  # phases
        ["schedule=progressive", "calibration=auxiliary", "calibration.epochs=0"],  # all stages, in every round
        ["strategy.weighting=examples", "rounds=70", "clients_per_round=2", "checkpoint_every=3"],  # longer numbers
    ],
    ids=",".join,
)
def test_steps_and_bytes_are_those_of_the_run(tmp_path, overrides):
    folder = tmp_path / "run"
    components = build([*QUICK, *overrides], folder)
    run([*QUICK, *overrides, f"output_dir={folder}"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saves_state = any(file.parent.parent.parent.name == "clients" for file in folder.rglob("round-*"))
    rounds = count_rounds(components, saves_state=saves_state)
    assert [(counts.clients, counts.bytes_down, counts.bytes_up) for counts in rounds] == [
        (line["clients"], line["bytes_down"], line["bytes_up"]) for line in lines
    ]
    assert rounds[-1].models == len(list(folder.glob("encoder*.pt")))


def test_the_steps_of_clients_by_hand(tmp_path):
    """Clients of 20 images: ceil(20 / 8) = 3 batches, 2 epochs, 3 clients in each of 4 rounds."""
    components = build([*QUICK, "partition=iid", "batch_size=8", "local_epochs=2"], tmp_path)
    assert [counts.steps for counts in count_rounds(components, saves_state=False)] == 4 * [3 * 3 * 2]


def test_clients_with_too_few_images_are_not_counted(tmp_path):
    """SimSiam needs three images, and one of three clients has two."""
    file = tmp_path / "partition.csv"
    file.write_text("client\n" + "0\n" * 2 + "1\n" * 40 + "2\n" * 58)
    overrides = ["num_clients=3", "partition=file", f"partition.file={file}", "method=simsiam"]
    components = build([*QUICK, *overrides, "batch_size=20"], tmp_path / "run")
    rounds = count_rounds(components, saves_state=False)
    assert [(counts.clients, counts.steps) for counts in rounds] == 4 * [(2, 2 + 3)]
