"""What a device did is recorded for its owner."""

import json

from fedssl.fleet import device_cli, history
from tests.devices import SMALL, Devices, context, run_server_app, write_images


def test_training_refusals_and_encoders_are_recorded_and_shown(tmp_path):
    (tmp_path / "limits.yaml").write_text("max_rounds_per_day: 2\n")
    places = {name: {"data_path": write_images(tmp_path / name, 9), "client_name": name} for name in "ab"}
    made = [context(**place, state_path=tmp_path / "states" / name) for name, place in places.items()]
    made[1].node_config["limits"] = str(tmp_path / "limits.yaml")
    overrides = ["engine=deployment", "engine.address=10.0.0.1:1", "engine.root_certificates=x", *SMALL]
    overrides += ["rounds=3", "num_clients=2", "aggregation.min_updates=1", f"output_dir={tmp_path / 'run'}"]
    run_server_app(Devices(*made), overrides)
    events = history.read_history(tmp_path / "states" / "b")
    assert [event["event"] for event in events] == [*2 * ["trained", "update sent"], "refused", "encoder stored"]
    trained = events[0]
    assert (trained["round"], trained["images"], trained["epochs"]) == (1, 9, 1)
    assert trained["loss"] > 0
    (line, *_) = (json.loads(text) for text in (tmp_path / "run" / "clients.jsonl").read_text().splitlines())
    assert events[1]["bytes"] == line["bytes_up"]
    assert "2 rounds per day at most" in events[4]["reason"]
    assert events[5]["bytes"] == (tmp_path / "run" / "encoder.pt").stat().st_size

    text = device_cli._history(tmp_path / "states" / "b")
    assert text.startswith("The last events (history.jsonl):\n")
    assert len(text.splitlines()) == 7
    megabytes = 2 * line["bytes_up"] / 1e6
    assert device_cli._budgets(tmp_path / "limits.yaml", tmp_path / "states" / "b") == (
        "No round starts now: this device trains in 2 rounds per day at most (max_rounds_per_day). In the last 24 "
        f"hours: 2 of 2 rounds, {megabytes:.1f} MB sent."
    )
    assert device_cli._history(tmp_path / "nothing") == "No server has sent a message yet."
