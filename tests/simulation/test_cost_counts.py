"""Steps and bytes of a plan equal those of the run, or are upper bounds with a reason."""

import json

import pytest

from fedssl.errors import InputError
from simulation import cli
from simulation.cost_counts import count_rounds, why_upper_bound
from tests.planning import QUICK, build

CASES = [
    ["strategy=fedavg"],
    ["method=byol", "local_epochs=2", "batch_size=16"],  # clients have a state
    ["method=orchestra", "wire_dtype=int8"],  # a server side, and differences
    ["method=byol", "strategy=fedu", "wire_dtype=fp16"],  # parts of the model
    ["schedule=layer_wise", "method=byol"],  # phases
    ["schedule=progressive", "calibration=auxiliary", "calibration.epochs=0"],  # all stages, in every round
    ["strategy=gossip"],
    ["strategy=per_ssl"],
    ["strategy.weighting=examples", "rounds=70", "clients_per_round=2", "checkpoint_every=3"],  # longer numbers
]
OTHERS = [
    [],
    *([f"strategy={name}"] for name in ("fedbn", "local_only", "clustered", "eua", "featarc", "loss_weighted")),
    ["strategy=fedema", "method=byol"],
    ["method=moco_v3", "schedule=layer_wise", "unseen_clients=1"],
    ["method=fedx", "regularizer=fur"],
    ["method=simsiam", "partition.alpha=0.1", "clients_per_round=5"],
    ["rounds=70", "method=byol", "keep_checkpoints=3", "checkpoint_every=4"],
]


@pytest.mark.parametrize(
    "overrides", [*CASES, *(pytest.param(case, marks=pytest.mark.heavy) for case in OTHERS)], ids=",".join
)
def test_steps_and_bytes_are_those_of_the_run(tmp_path, overrides):
    folder = tmp_path / "run"
    components = build([*QUICK, *overrides], folder)
    cli.run([*QUICK, *overrides, f"output_dir={folder}"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saves_state = any(file.parent.parent.parent.name == "clients" for file in folder.rglob("round-*"))
    rounds, num_models = count_rounds(components, saves_state=saves_state)
    assert why_upper_bound(components) == []
    for line, counts in zip(lines, rounds, strict=True):
        assert (counts.clients, counts.bytes_down, counts.bytes_up) == (
            line["clients"],
            line["bytes_down"],
            line["bytes_up"],
        )
    trained = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    parts = components.client_data.parts
    assert sum(counts.images for counts in rounds) == sum(len(parts[row["client"]]) for row in trained)
    assert num_models == len(list(folder.glob("encoder*.pt")))


def test_the_steps_of_clients_by_hand(tmp_path):
    """Clients of 20 images: ceil(20 / 8) = 3 batches, 2 epochs, 3 clients in each of 4 rounds."""
    components = build([*QUICK, "partition=iid", "batch_size=8", "local_epochs=2"], tmp_path)
    rounds, _ = count_rounds(components, saves_state=False)
    assert [counts.steps for counts in rounds] == 4 * [3 * 3 * 2]
    assert [counts.images for counts in rounds] == 4 * [60]


BOUNDED = [
    ["availability=diurnal", "client_speed=lognormal", "availability.dropout=0.5", "aggregation.max_retries=9"],
    ["strategy=euc", "rounds=9"],  # a plan that skips layers is longer by their names
    ["aggregation.max_norm_ratio=1"],
    ["strategy.weighting=examples", "aggregation.max_examples=19"],
    ["aggregation.over_selection=1"],
    ["aggregation.buffered=true", "aggregation.min_updates=2"],
    # The stages that are frozen when the clusters are made are sent again.
    [
        *("strategy=clustered", "strategy.assign_by=update_cosine", "strategy.cluster_round=4", "clients_per_round=5"),
        *("schedule=layer_wise", "rounds=8", "partition.alpha=0.05"),
    ],
]


@pytest.mark.parametrize("overrides", BOUNDED, ids=",".join)
def test_what_depends_on_training_is_an_upper_bound(tmp_path, overrides):
    folder = tmp_path / "run"
    components = build([*QUICK, *overrides], folder)
    (name,) = why_upper_bound(components)
    assert overrides[0].startswith(name) or overrides[1].startswith(name)
    cli.run([*QUICK, *overrides, f"output_dir={folder}"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds, _ = count_rounds(components, saves_state=False)
    for line, counts in zip(lines, rounds, strict=True):
        assert line["bytes_up"] <= counts.bytes_up
        assert line["bytes_down"] <= counts.bytes_down or overrides[0] == "strategy=euc"
    assert sum(line["bytes_down"] for line in lines) <= sum(counts.bytes_down for counts in rounds)


def test_strategies_with_options_that_change_no_size_are_exact(tmp_path):
    assert why_upper_bound(build([*QUICK, "strategy=euc", "strategy.interval=1"], tmp_path)) == []
    clustered = ["strategy=clustered", "strategy.assign_by=update_cosine", "clients_per_round=5"]
    assert why_upper_bound(build([*QUICK, *clustered], tmp_path)) == []


def write_partition(file, counts, *, num_images):
    """Write a partition of images, in which client k has ``counts[k]`` and the last one has the others."""
    clients = [client for client, count in enumerate(counts) for _ in range(count)]
    clients += [len(counts)] * (num_images - len(clients))
    file.write_text("client\n" + "".join(f"{client}\n" for client in clients))


def test_clients_with_too_few_images_are_not_counted(tmp_path):
    """SimSiam needs three images, and one client has two."""
    write_partition(tmp_path / "partition.csv", [2, 40], num_images=100)
    overrides = [*QUICK, "num_clients=3", "partition=file", f"partition.file={tmp_path / 'partition.csv'}"]
    overrides += ["method=simsiam", "schedule=layer_wise"]
    components = build(overrides, tmp_path / "run")
    cli.run([*overrides, f"output_dir={tmp_path / 'run'}"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rounds, _ = count_rounds(components, saves_state=False)
    assert [(line["clients"], line["bytes_down"], line["bytes_up"]) for line in lines] == [
        (counts.clients, counts.bytes_down, counts.bytes_up) for counts in rounds
    ]
    assert [(counts.clients, counts.images) for counts in rounds] == 4 * [(2, 98)]
    with pytest.raises(InputError, match=r"2 clients have the 3 images that SimSiam needs, .*min_updates=3; lower"):
        build([*overrides, "aggregation.min_updates=3"], tmp_path / "run")
