"""A checkpoint with a right sum and a wrong content is named, and the one before is taken."""

import dataclasses

import numpy as np
import pytest

from fedssl.errors import InputError
from server_app.checkpoint import latest_checkpoint, save_checkpoint
from server_app.proven import StateSchema
from strategies.euc import EUC
from strategies.state import GLOBAL, GlobalModel, ServerState

LAYERS = {"weight": np.ones((2, 3), dtype=np.float32), "counter": np.array(4, dtype=np.int64)}
METHOD_BROADCAST = {"centre": np.zeros(2, dtype=np.float32)}
GOOD = GlobalModel(
    layers=LAYERS,
    broadcast=METHOD_BROADCAST,
    strategy_state={"intervals": {"weight": 2}},
    server_optimizer_state={"first": LAYERS},
    num_updates=1,
)
EXPECTED = StateSchema(
    untrained=GlobalModel(layers=LAYERS, broadcast=METHOD_BROADCAST),
    clients=2,
    phases=3,
    is_valid_model_state=EUC(interval=2, weighting="uniform").server.is_valid_model_state,
    is_valid_strategy_state=EUC(interval=2, weighting="uniform").server.is_valid_strategy_state,
)


def state(**changes):
    return ServerState(
        round=2, models={GLOBAL: dataclasses.replace(GOOD, **changes)}, last_participation={1: (2, GLOBAL)}
    )


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
    "moments": state(server_optimizer_state={"first": with_weight(np.ones(1))}),
    "moments no layers": state(server_optimizer_state={"first": 3}),
    "memory": state(strategy_state={"intervals": {"weight": float("inf")}}),
    "memory of another": state(strategy_state={"intervals": "often"}),
    "phase": state(phase=4),
    "phase no number": state(phase=True),
    "updates": state(num_updates=-1),
    "clients": ServerState(round=2, models={GLOBAL: GOOD}, last_participation={1: 2}),
    "models": ServerState(round=2, models={str(number): GOOD for number in range(4)}),
    "no models": ServerState(round=2, models=[]),
    "round": ServerState(round=7, models={GLOBAL: GOOD}),
}


def test_a_good_one_is_taken(tmp_path):
    save_checkpoint(tmp_path, state(), keep=2)
    assert latest_checkpoint(tmp_path, EXPECTED).round == 2


@pytest.mark.parametrize("kind", BAD)
def test_of_two_the_one_before_is_taken(tmp_path, kind, caplog):
    save_checkpoint(tmp_path, dataclasses.replace(state(), round=1), keep=3)
    save_checkpoint(tmp_path, dataclasses.replace(BAD[kind], round=2), keep=3)
    if kind == "round":
        for end in ("pt", "sha256"):
            (tmp_path / f"round-000001.{end}").rename(tmp_path / f"round-000003.{end}")
    found = latest_checkpoint(tmp_path, EXPECTED)
    assert found.round == (2 if kind == "round" else 1)
    assert "is damaged (" in caplog.text
    assert caplog.text.count("\n") == 1


def test_none_good_is_one_sentence(tmp_path):
    save_checkpoint(tmp_path, BAD["shape"], keep=1)
    with pytest.raises(InputError, match=r"are damaged \(1 found; .*weight is of another shape than the model's\)"):
        latest_checkpoint(tmp_path, EXPECTED)


def test_one_that_is_larger_than_the_models_can_be_is_not_read(tmp_path):
    save_checkpoint(tmp_path, state(), keep=1)
    with (tmp_path / "round-000002.pt").open("r+b") as stream:
        stream.truncate(EXPECTED.max_bytes + 1)
    with pytest.raises(InputError, match="bytes and may have"):
        latest_checkpoint(tmp_path, EXPECTED)
