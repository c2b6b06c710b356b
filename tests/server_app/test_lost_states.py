"""An update of a client that has lost its state during a run is dropped once, with the reason."""

import shutil

import pytest

from fedssl.wire.messages import PersonalizedModelRequest
from server_app.callbacks.personalized import request_personalized_encoders
from server_app.messaging import ClientMessenger
from tests.federation import Federation
from tests.runs import flip_bit

FEDU = ["strategy=fedu", "method=byol"]


def delete(folder):
    shutil.rmtree(folder)


def damage_newest(folder):
    """The client then loads the state before it."""
    flip_bit(folder / "round-000002.safetensors", 900)


@pytest.mark.parametrize(("overrides", "lose"), [(FEDU, delete), (["strategy=fedbn"], damage_newest)])
def test_a_client_without_its_state_is_dropped_once(tmp_path, overrides, lose):
    federation = Federation(tmp_path, *overrides)
    federation.run(2)
    assert federation.state.state_rounds == {0: 2, 1: 2, 2: 2}
    lose(tmp_path / "clients" / "0000" / "1")
    federation.run(1)
    assert federation.report.dropped == {1: "it has lost the state that it saved in round 2"}
    assert federation.state.state_rounds == {0: 3, 2: 3}
    federation.run(1)
    assert federation.report.dropped == {}
    assert federation.state.state_rounds == {0: 4, 1: 4, 2: 4}


def test_a_lost_state_gives_no_personalized_encoder(tmp_path, caplog):
    federation = Federation(tmp_path, *FEDU)
    federation.run(2)
    delete(tmp_path / "clients" / "0000" / "1")
    exchange, request = ClientMessenger(federation.grid), PersonalizedModelRequest()
    encoders = request_personalized_encoders(exchange, federation.components, federation.state, [0, 1, 2], request)
    assert [client for client, _, _ in encoders] == [0, 2]
    assert "client 1 returned no encoder: it has lost the state" in caplog.text
