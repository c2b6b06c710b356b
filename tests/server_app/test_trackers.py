"""Trackers: the same names in all, what each backend holds in the end, and failures that end no run.

Each is tried against its real backend, without a network, where its package is installed.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedssl.atomic_files import reject_symlinks
from fedssl.config.load import compose
from fedssl.errors import InputError
from server_app.trackers.base import SafeTracker, TrackedRun
from simulation.run import run
from tests.runs import read_summary

LINE = {"round": 1, "loss": 2.5, "model_cosine": None, "seconds": 1.0, "dropped": {"3": "late"}, "units": {"knn": "x"}}
LINE |= {"evaluation": {"knn": 0.5, "of {a}": 0.25}, "cost": {"flops": 8}, "health": {"global": {"spread": 0.75}}}
NUMBERS = {"loss": 2.5, "seconds": 1.0, "dropped": 1, "knn": 0.5, "of _a_": 0.25, "cost/flops": 8}
NUMBERS |= {"health/global/spread": 0.75}
SUMMARY = {"status": "finished", "rounds": 3, "final": {"federated": {"knn": 0.9}, "pixels": {"knn": 0.4}}}
FINAL = {"final/federated/knn": 0.9, "final/pixels/knn": 0.4}


def track(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> str:
    """A run that is stopped, resumed after no round, after one, and twice after three, which are all; its id."""
    folder.mkdir(exist_ok=True)
    overrides = [f"tracker={name}", f"output_dir={folder}", "run_id=r12"]
    stopped, paused = {"status": "interrupted", "rounds": 2}, {"status": "paused", "rounds": 3}
    starts = [(0, (1,), [], stopped), (0, (1, 2), [], stopped), (1, (2, 3), ["rounds=40"], paused)]
    starts += [(3, (), ["rounds=40"], SUMMARY), (3, (), ["rounds=40"], SUMMARY)]
    for done, rounds, more, summary in starts:
        settings = compose([*overrides, *more]).recording
        tracking = SafeTracker(settings)
        tracking.begin(settings, done=done)
        for round in rounds:
            tracking.round({**LINE, "round": round, "loss": 2.5 + round})
        tracking.end(summary)
    reject_symlinks(folder)  # they would be refused when it is resumed
    assert "the tracker failed" not in caplog.text
    return settings.run_id


def test_tensorboard(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(tmp_path, "tensorboard", caplog)
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=False).Reload()
    assert set(events.Tags()["scalars"]) == NUMBERS.keys() | FINAL.keys()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(1, 3.5), (2, 4.5), (3, 5.5)]
    assert [(one.step, one.value) for one in events.Scalars("final/pixels/knn")] == [(3, pytest.approx(0.4))]
    (text,) = {bytes(one.tensor_proto.string_val[0]) for one in events.Tensors("settings/text_summary")[-1:]}
    assert b'    strategy._target_: "strategies.fedavg.FedAvg"' in text


def test_mlflow(tmp_path, caplog):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    run_id = track(tmp_path, "mlflow", caplog)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fedssl")
    (found,) = client.search_runs([experiment.experiment_id])  # the resumed run is the same one
    assert found.data.tags["fedssl.run_id"] == run_id
    assert (found.info.run_name, found.info.status) == (tmp_path.name, "FINISHED")
    assert found.data.metrics == {**NUMBERS, "loss": 5.5, **FINAL}
    losses, finals = (client.get_metric_history(found.info.run_id, name) for name in ("loss", "final/pixels/knn"))
    assert sorted((one.step, one.value) for one in losses) == [(1, 3.5), (2, 4.5), (3, 5.5)]
    assert [(one.step, one.value) for one in finals] == [(3, 0.4)]
    assert (found.data.params["partition.alpha"], found.data.params["rounds"]) == ("0.5", "20")


def records(log: bytes) -> Iterator[bytes]:
    """What is in a file of W&B: 7 bytes, then LevelDB's log format, records cut into pieces by blocks of 32 KiB."""
    place, found = 7, b""
    while place + 7 <= len(log):
        if 32768 - place % 32768 < 7:  # no place for a header
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", log, place + 4)
        found += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield found
            found = b""


def test_wandb(tmp_path, caplog, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run_id = track(tmp_path / "run", "wandb", caplog)
    histories, summary, settings = [], {}, {}
    for file in sorted(tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        for data in records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                values = {one.key or "/".join(one.nested_key): one.value_json for one in record.history.item}
                histories.append({key: json.loads(value) for key, value in values.items()})
            for one in (*record.summary.update, *record.run.summary.update):
                summary[one.key or "/".join(one.nested_key)] = json.loads(one.value_json)
            for one in record.run.config.update:
                settings[one.key or "/".join(one.nested_key)] = json.loads(one.value_json)
    assert [(row["round"], row["_step"]) for row in histories] == [(1, 1), (1, 1), (2, 2), (2, 2), (3, 3)]
    assert histories[-1].items() >= {"round": 3, **NUMBERS, "loss": 5.5}.items()
    assert {key: summary[key] for key in (*FINAL, "status")} == {**FINAL, "status": "finished"}
    assert settings["partition.alpha"] == 0.5


def test_wandb_gets_the_project(tmp_path, monkeypatch):
    started = []
    stand_in = SimpleNamespace(Settings=dict, init=lambda **arguments: started.append(arguments))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    settings = compose(["tracker=wandb", "tracker.project=mine", f"output_dir={tmp_path}"]).recording
    SafeTracker(settings).begin(settings, done=0)
    assert [arguments["project"] for arguments in started] == ["mine"]


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow.tracking")]
)
def test_a_missing_package_is_one_sentence_before_any_work(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"tracker={name} needs the package .*uv sync --extra {name}, or pip install"):
        run([f"tracker={name}", f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


class Broken:
    """A tracker whose server goes away in round 1."""

    def begin(self, run: TrackedRun) -> None:
        assert run.settings["strategy.reported_metrics"] == ["train-loss", "seconds"]

    def round(self, round: int, numbers: dict[str, float]) -> None:
        raise ConnectionError(f"round {round} [{numbers['dropped']}]\nis lost")

    def end(self, status: str, *, round: int, final: dict[str, float]) -> None:
        raise AssertionError("nothing more is told")


def test_a_failing_tracker_is_logged_once(tmp_path):
    overrides = ["num_clients=2", "rounds=2", "local_epochs=0", "dataset.limit=24", "encoder.width=2", "threads=1"]
    overrides += ["partition=iid", "evaluate_every=0", "final_evaluation=none", "measure_resources=false"]
    run([*overrides, f"tracker._target_={__name__}.Broken", f"output_dir={tmp_path}"])
    assert read_summary(tmp_path)["status"] == "finished"
    lines = [line.split(" ", 2)[-1] for line in (tmp_path / "run.log").read_text().splitlines()]
    told = [line for line in lines if line.startswith("the tracker")]
    assert told == [
        "the tracker failed and is disabled for the rest of this run, whose folder has all metrics: ConnectionError: "
        "round 1 [0] is lost"
    ]
