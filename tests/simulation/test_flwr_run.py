"""Plain ``flwr run .`` on Flower's runtime, without options."""

import json

import pytest

from tests.busy import busy_machine
from tests.devices import write_images
from tests.flower import check_run_of_two_nodes, copy_app, flwr_run

TINY = "encoder.width=4 threads=1 evaluation=none final_evaluation=none collapse_images=0 measure_resources=false"
TINY += " dataset.mean=federated"
WORDS = f"dataset.limit=60 {TINY}"


@pytest.mark.heavy
def test_without_options_the_federation_sets_the_number_of_clients(tmp_path):
    with busy_machine():
        # Only options that shorten the run. The two SuperNodes are Flower's default.
        flat = f"num-server-rounds=1 local-epochs=1 strategy='fedavg' partition-alpha=0.5 output-dir='{tmp_path}/run'"
        outcome = flwr_run(copy_app(tmp_path / "app"), "--run-config", f'{flat} overrides="{WORDS}"')
    assert outcome.status == "finished:completed", outcome.log
    check_run_of_two_nodes(tmp_path / "run", outcome.log)
    assert "statistics of the images of 2 of 2 clients, 2 of which were asked: dataset.mean=[0." in outcome.log


@pytest.mark.heavy
def test_supernodes_train_on_their_own_images(tmp_path):
    nodes = []
    for seed, name in enumerate(("garden", "roof")):
        folder = write_images(tmp_path / name, 12, seed=seed)
        nodes.append(f'data-path="{folder}" client-name="{name}" state-path="{tmp_path}/states"')
    overrides = f"num_clients=2 dataset.size=8 dataset.channels=1 method=byol {TINY}"
    flat = f"dataset='folder' num-server-rounds=2 local-epochs=1 output-dir='{tmp_path}/run'"
    outcome = flwr_run(copy_app(tmp_path / "app"), "--run-config", f'{flat} overrides="{overrides}"', devices=nodes)
    assert outcome.status == "finished:completed", outcome.log
    assert "devices: 0 garden, 1 roof" in outcome.log
    assert "statistics of the images of 2 of 2 clients, 2 of which were asked: dataset.mean=[0.4" in outcome.log
    clients = (tmp_path / "run" / "clients.jsonl").read_text().splitlines()
    assert [json.loads(line)["client"] for line in clients] == [0, 1, 0, 1]
    kept = sorted(str(file.relative_to(file.parents[1])) for file in (tmp_path / "states").glob("*/*/*.safetensors"))
    assert kept == [f"{name}/round-00000{round}.safetensors" for name in ("garden", "roof") for round in (1, 2)]
