"""Checkpoints: what is written is read back, and damage is noticed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedssl.atomic_files import saved_rounds
from fedssl.errors import InputError
from fedssl.runs.manifest import Manifest, file_part, write_manifest
from server_app.checkpoint import StateSchema, latest_checkpoint, save_checkpoint
from strategies.cluster_assignment import ClusterState
from strategies.euc import EUCState
from strategies.types import GLOBAL, GlobalModel, ServerState
from tests.arrays import same


def checkpoint(round):
    layers = {"weight": np.full((1000,), round, dtype=np.float32), "counter": np.array(round, dtype=np.int64)}
    return ServerState(round=round, models={GLOBAL: GlobalModel(layers=layers)})


def test_round_trip_keeps_all_that_the_server_carries(tmp_path):
    layers = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "counter": np.array(7, dtype=np.int64)}
    twice = {name: 2 * array for name, array in layers.items()}
    first = GlobalModel(
        layers=layers,
        broadcast=twice,
        strategy_state={"intervals": {"weight": 3}, "word": "on", "sums": twice, "nothing": None},
        mod_states={"Optimizer": {"first": layers, "second": twice}},
        phase=2,
    )
    models = {"1": first, "10": GlobalModel(layers=twice)}
    state = ServerState(round=4, models=models, last_participation={0: (4, "1"), 12: (3, "10")})
    save_checkpoint(tmp_path, state, keep=1)
    back = latest_checkpoint(tmp_path)
    assert (back.round, back.model_names(), back.last_participation) == (4, ["1", "10"], {0: (4, "1"), 12: (3, "10")})
    assert back.last_round(12, "10") == 3
    found = back.models["1"]
    assert found.phase == 2
    for one, other in ((found.layers, layers), (found.broadcast, twice), (found.strategy_state["sums"], twice)):
        assert same(one, other)
    kept = {name: found.strategy_state[name] for name in ("intervals", "word", "nothing")}
    assert kept == {"intervals": {"weight": 3}, "word": "on", "nothing": None}
    assert list(found.mod_states["Optimizer"]) == ["first", "second"]
    assert same(found.mod_states["Optimizer"]["second"], twice)
    assert same(back.models["10"].layers, twice)
    assert (back.models["10"].broadcast, back.models["10"].strategy_state, back.models["10"].phase) == ({}, {}, 1)


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path):
    save_checkpoint(tmp_path, ServerState(round=1), keep=1)
    file = tmp_path / "round-000001.pt"
    torch.save({**torch.load(file), "format": 4}, file)
    write_manifest(file.with_suffix(".json"), Manifest((file_part(tmp_path.parent, file),)))
    with pytest.raises(InputError, match="it has the format of another version of fedssl; resume with that version"):
        latest_checkpoint(tmp_path)


def test_only_the_newest_are_left(tmp_path):
    for round in (1, 2, 3, 4):
        save_checkpoint(tmp_path, checkpoint(round), keep=2)
    assert saved_rounds(tmp_path) == [3, 4]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", ["cut", "flip", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, caplog, damage):
    for round in (1, 2):
        save_checkpoint(tmp_path, checkpoint(round), keep=2)
    newest = tmp_path / "round-000002.pt"
    data = bytearray(newest.read_bytes())
    if damage == "cut":
        newest.write_bytes(data[:-100])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        newest.write_bytes(data)
    else:
        newest.with_suffix(".json").unlink()
    assert latest_checkpoint(tmp_path).round == 1
    assert "round-000002.pt cannot be used" in caplog.text


LAYERS = {"weight": np.ones((2, 3), dtype=np.float32), "counter": np.array(4, dtype=np.int64)}
METHOD_BROADCAST = {"centre": np.zeros(2, dtype=np.float32)}
STATES = {"strategy_state": {"intervals": {"weight": 2}}, "mod_states": {"Optimizer": {"first": LAYERS}}}
GOOD = GlobalModel(layers=LAYERS, broadcast=METHOD_BROADCAST, num_updates=1, **STATES)
TYPES = {"model_state_type": EUCState, "strategy_state_type": ClusterState}
SCHEMA = StateSchema(untrained=GlobalModel(layers=LAYERS, broadcast=METHOD_BROADCAST), clients=2, phases=3, **TYPES)


def state(**changes):
    return ServerState(round=2, models={GLOBAL: replace(GOOD, **changes)}, last_participation={1: (2, GLOBAL)})


def with_weight(weight):
    return {**LAYERS, "weight": np.asarray(weight)}


BAD = {
    "name": state(layers={**LAYERS, "other": LAYERS["weight"]}),
    "missing": state(layers={"weight": LAYERS["weight"]}),
    "shape": state(layers=with_weight(np.ones((3, 2), dtype=np.float32))),
    "dtype": state(layers=with_weight(np.ones((2, 3)))),
    "not finite": state(layers=with_weight(np.full((2, 3), np.nan, dtype=np.float32))),
    "word": state(layers={**LAYERS, "weight": "x"}),
    "shared": state(broadcast={}),
    "moments": state(mod_states={"Optimizer": {"first": with_weight(np.ones(1))}}),
    "moments no layers": state(mod_states={"Optimizer": {"first": 3}}),
    "infinite interval": state(strategy_state={"intervals": {"weight": float("inf")}}),
    "interval no integer": state(strategy_state={"intervals": {"weight": True}}),
    "intervals no mapping": state(strategy_state={"intervals": "often"}),
    "state of another strategy": state(strategy_state={"sums": {}}),
    "clusters": replace(state(), strategy_state={"members": {"0": "1"}}),
    "clusters of another strategy": replace(state(), strategy_state={"intervals": {}}),
    "model outside the folder": ServerState(round=2, models={"../x": GOOD}),
    "phase": state(phase=4),
    "phase no number": state(phase=True),
    "updates": state(num_updates=-1),
    "clients": ServerState(round=2, models={GLOBAL: GOOD}, last_participation={1: 2}),
    "dropped client": ServerState(round=2, models={GLOBAL: GOOD}, dropped={1: 3}),
    "client of a path": ServerState(round=2, models={GLOBAL: GOOD}, last_participation={1: (2, "a/b")}),
    "models": ServerState(round=2, models={str(number): GOOD for number in range(4)}),
    "no models": ServerState(round=2, models=[]),
    "round": ServerState(round=7, models={GLOBAL: GOOD}),
}


def test_a_state_of_the_run_is_valid(tmp_path):
    valid = replace(state(), strategy_state={"members": {0: GLOBAL}})
    save_checkpoint(tmp_path, valid, keep=2)
    assert latest_checkpoint(tmp_path, SCHEMA).strategy_state == valid.strategy_state


@pytest.mark.parametrize("kind", BAD)
def test_an_invalid_state_is_skipped_for_the_previous_checkpoint(tmp_path, kind, caplog):
    save_checkpoint(tmp_path, replace(state(), round=1), keep=3)
    save_checkpoint(tmp_path, replace(BAD[kind], round=2), keep=3)
    if kind == "round":
        for end in ("pt", "json"):
            (tmp_path / f"round-000001.{end}").rename(tmp_path / f"round-000003.{end}")
    found = latest_checkpoint(tmp_path, SCHEMA)
    assert found.round == (2 if kind == "round" else 1)
    assert "cannot be used (" in caplog.text
    assert caplog.text.count("\n") == 1


def test_a_checkpoint_larger_than_its_models_is_not_read(tmp_path):
    save_checkpoint(tmp_path, state(), keep=1)
    with (tmp_path / "round-000002.pt").open("r+b") as stream:
        stream.truncate(SCHEMA.max_bytes + 1)
    with pytest.raises(InputError, match="round-000002.pt has .* bytes instead of"):
        latest_checkpoint(tmp_path, SCHEMA)
