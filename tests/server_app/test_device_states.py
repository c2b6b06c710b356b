"""States that devices have saved after updates that the server lacks, and states that they have lost."""

import shutil

import pytest

from client_app import handlers
from fedssl.fleet.encoders import stored_encoders
from fedssl.flower_internals import error_reply
from fedssl.wire.messages import CONFIG, LAST_USED_ROUND
from tests.devices import SMALL, Devices, context, run_server_app, write_places
from tests.runs import model_bits, read_lines

STRATEGIES = {
    "scaffold": ["strategy=scaffold", "aggregation.min_updates=2"],
    "feddyn": ["strategy=feddyn", "aggregation.min_updates=2"],
    "fedu": ["strategy=fedu", "method=byol"],
    "fedsc": ["method=fedsc", "method.projector.hidden_dim=8", "strategy=fedavg"],
    "frozen stages": ["schedule=layer_wise", "strategy=fedavg", "checkpoint_every=3"],
}

DELIVERED = ["engine=deployment", "engine.address=10.0.0.1:1", "engine.root_certificates=x"]


@pytest.fixture
def places(tmp_path):
    return write_places(tmp_path / "images")


def devices(places, states, handle=handlers.handle):
    made = (context(data_path=place, state_path=states / place.name, client_name=place.name) for place in places)
    return Devices(*made, handle=handle)


def train(folder, places, overrides, handle=handlers.handle):
    overrides = [*SMALL, "rounds=4", "seed=3", "run_id=one", *overrides]
    run_server_app(devices(places, folder / "states", handle), [*overrides, f"output_dir={folder / 'run'}"])
    return folder / "run"


def loses(rounds, *, trains):
    """Return a ClientApp whose device b fails in these rounds: with its update, or before it ``trains``."""

    def handle(message, device):
        config = message.content.config_records.get(CONFIG, {})
        if config.get("round") not in rounds or device.node_config["client-name"] != "b":
            return handlers.handle(message, device)
        if trains:
            assert not handlers.handle(message, device).has_error()
        return error_reply(message, "the connection was lost")

    return handle


@pytest.mark.parametrize(
    "name", [*list(STRATEGIES)[:1], *(pytest.param(n, marks=pytest.mark.heavy) for n in list(STRATEGIES)[1:])]
)
def test_a_lost_update_leaves_no_trace_on_the_device(name, places, tmp_path):
    """The first one, and two in succession."""
    rounds, overrides = (1, 3, 4), [*STRATEGIES[name], "rounds=5"]
    runs = [train(tmp_path / str(trains), places, overrides, loses(rounds, trains=trains)) for trains in (False, True)]
    dropped = [[line["dropped"] for line in read_lines(run / "metrics.jsonl")] for run in runs]
    assert [number for number, lost in enumerate(dropped[1], start=1) if lost] == [*rounds]
    assert dropped[0] == dropped[1]
    assert model_bits(runs[0]) == model_bits(runs[1])


def test_a_run_set_back_has_the_bits_of_another(places, tmp_path):
    """The server loses rounds 3 and 4. When they are repeated, one device is away in round 3."""
    overrides, folder = STRATEGIES["scaffold"], tmp_path / "set back"
    expected = train(tmp_path / "once", places, overrides, loses((3,), trains=False))
    run = train(folder, places, [*overrides, "keep_checkpoints=4"])
    for version in (3, 4):
        for file in (run / "checkpoints").glob(f"round-{version:06}*"):
            file.unlink()
    run_server_app(devices(places, folder / "states", loses((3,), trains=False)), [f"resume={run}"])
    assert model_bits(run) == model_bits(expected)


@pytest.mark.parametrize("name", ["scaffold", pytest.param("feddyn", marks=pytest.mark.heavy)])
def test_a_device_that_has_lost_its_correction_is_left_out(name, places, tmp_path):
    """Server and devices then agree, as if it had been away."""
    away = train(tmp_path / "away", places, STRATEGIES[name], loses((3, 4), trains=False))
    states = tmp_path / "lost" / "states"

    def handle(message, device):
        if (
            message.content.config_records.get(CONFIG, {}).get("round") == 3
            and device.node_config["client-name"] == "b"
        ):
            assert message.content.config_records[CONFIG][LAST_USED_ROUND] == 2
            (lost,) = (states / "b").glob("*/b")
            shutil.rmtree(lost)
        return handlers.handle(message, device)

    run = train(tmp_path / "lost", places, STRATEGIES[name], handle)
    dropped = [line["dropped"] for line in read_lines(run / "metrics.jsonl")]
    assert [list(lost) for lost in dropped] == [[], [], ["1"], ["1"]]
    assert "it has lost the correction of gradients that it saved in round 2" in dropped[3]["1"]
    assert dropped[3]["1"].endswith("register the device under another name")
    assert model_bits(run) == model_bits(away)


def test_a_device_without_a_used_update_receives_its_own_encoder(places, tmp_path):
    """The server has its model of round 3; before, it sent the first device's."""
    train(tmp_path, places, [*DELIVERED, "strategy=local_only"], loses((4,), trains=True))
    found = {name: stored_encoders(tmp_path / "states" / name) for name in "abc"}
    models = {name: [fields["model"] for _, fields in encoders] for name, encoders in found.items()}
    assert models == {"a": ["0"], "b": ["1"], "c": ["2"]}
    assert found["b"][0][0].read_bytes() == (tmp_path / "run" / "encoder-1.pt").read_bytes()


def test_a_device_whose_model_was_never_trained_receives_none(places, tmp_path):
    train(tmp_path, places, [*DELIVERED, "strategy=local_only"], loses((1, 2, 3, 4), trains=False))
    assert [len(stored_encoders(tmp_path / "states" / name)) for name in "abc"] == [1, 0, 1]


def test_an_encoder_with_untrained_stages_is_not_delivered(places, tmp_path):
    """The fourth stage is trained from round 4 on; an exported encoder has all four."""
    overrides = ["schedule=progressive", "schedule.rounds_per_stage=[1,1,1,1]", "engine.deliver_every=1"]
    train(tmp_path, places, [*DELIVERED, "strategy=fedavg", *overrides])
    assert [fields["round"] for _, fields in stored_encoders(tmp_path / "states" / "a")] == [4]
