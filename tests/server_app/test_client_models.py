"""Models of single clients are in files: only those that changed are written, and a checkpoint refers to them."""

import json
import shutil

import numpy as np
import pytest

from fedssl.atomic_files import saved_rounds
from fedssl.errors import RunError
from fedssl.runs.manifest import CLIENT_MODELS, client_folder
from server_app.checkpoint import latest_checkpoint, save_checkpoint
from server_app.client_models import ClientModels
from simulation.run import run
from strategies.types import GlobalModel, ServerState
from tests.runs import flip_bit, read_lines, read_summary
from tests.test_digests import BASE, model_digests


def model(value):
    return GlobalModel(layers={"weight": np.full(3, value, np.float32)}, num_updates=2, strategy_state={"a": 1.5})


def files(folder):
    return {str(file.relative_to(folder / CLIENT_MODELS)) for file in folder.rglob("round-*.pt")}


def test_a_model_is_written_when_it_changes(tmp_path):
    models = ClientModels(tmp_path, {}).updated({"10": model(1.0), "2": model(2.0)})
    assert models["2"].layers["weight"][0] == 2.0
    assert not files(tmp_path)
    first = models.saved(round=1, oldest_resumable=0)
    assert files(tmp_path) == {"0000/10/round-000001.pt", "0000/2/round-000001.pt"}
    second = first.updated({"2": model(3.0), "1234": model(4.0)}).saved(round=2, oldest_resumable=0)
    names = ("0000/10/round-000001", "0000/2/round-000001", "0000/2/round-000002", "0001/1234/round-000002")
    assert files(tmp_path) == {f"{name}.pt" for name in names}
    assert list(second) == ["2", "10", "1234"]
    assert len(second) == 3
    assert "10" in second
    assert "3" not in second
    assert [second[name].layers["weight"][0] for name in second] == [3.0, 1.0, 4.0]
    assert (second["10"].num_updates, second["10"].strategy_state) == (2, {"a": 1.5})
    assert first["2"].layers["weight"][0] == 2.0  # the earlier state is unchanged


def test_versions_that_no_checkpoint_needs_are_deleted(tmp_path):
    models = ClientModels(tmp_path, {})
    for round in range(1, 6):  # checkpoints of the last two rounds
        models = models.updated({"0": model(round)}).saved(round=round, oldest_resumable=max(round - 2, 0))
    assert saved_rounds(client_folder(tmp_path / CLIENT_MODELS, 0)) == [3, 4, 5]


def test_a_checkpoint_refers_to_the_files(tmp_path):
    models = ClientModels(tmp_path, {}).updated({"0": model(1.0), "7": model(2.0)}).saved(round=1, oldest_resumable=0)
    save_checkpoint(tmp_path / "checkpoints", ServerState(round=1, models=models), keep=1)
    parts = json.loads((tmp_path / "checkpoints" / "round-000001.json").read_text().split("\n")[1])["parts"]
    paths = ["checkpoints/round-000001.pt", *(f"client_models/0000/{name}/round-000001.pt" for name in (0, 7))]
    assert [part["path"] for part in parts] == paths
    assert latest_checkpoint(tmp_path / "checkpoints").models == {}


def test_a_damaged_file_is_one_sentence(tmp_path):
    models = ClientModels(tmp_path, {}).updated({"0": model(1.0)}).saved(round=1, oldest_resumable=0)
    file = tmp_path / "client_models/0000/0/round-000001.pt"
    flip_bit(file, file.read_bytes().index(np.full(3, 1.0, np.float32).tobytes()))
    with pytest.raises(RunError, match="0/round-000001.pt cannot be read .*; resume the run from an intact checkpoint"):
        models["0"]


ALONE = [*BASE, "rounds=4", "clients_per_round=2"]


@pytest.mark.parametrize("strategy", ["local_only", pytest.param("gossip", marks=pytest.mark.heavy)])
def test_a_resumed_run_has_the_same_models(tmp_path, strategy):
    """Checkpoint and model files of the last rounds are lost in different ways."""
    overrides = [*ALONE, f"strategy={strategy}"]
    run([*overrides, f"output_dir={tmp_path / 'whole'}"])
    expected = model_digests(tmp_path / "whole")
    rows = read_lines(tmp_path / "whole" / "clients.jsonl")
    for client in range(3):
        trained = [row["round"] for row in rows if row["client"] == client]
        versions = saved_rounds(client_folder(tmp_path / "whole" / CLIENT_MODELS, client))
        assert versions == trained[-len(versions) :]  # in rounds without it, its file is not written again
    folder = tmp_path / "half"
    run([*overrides, "pause_after=3", f"output_dir={folder}"])
    newest = max(folder.glob("client_models/0000/*/round-000003.pt"))
    shutil.copy(newest, newest.with_name("round-000009.pt"))  # of a run that was killed later
    flip_bit(newest, 700)
    run([f"resume={folder}"])
    assert model_digests(folder) == expected
    [recovery] = read_summary(folder)["recoveries"]
    assert "round 3 could not be used: client_models/0000/" in recovery
    assert not list(folder.glob("client_models/*/*/round-000009.pt"))
