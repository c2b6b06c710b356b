"""An update of a client that has lost its state, or has one of an impossible round, is dropped with the reason."""

import shutil
from dataclasses import replace

import pytest

from fedssl.wire.messages import ClientUpdate, PersonalizedModelRequest
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


@pytest.mark.parametrize("rounds", [(10**6, 10**6), (1, 10**6), (2, 2), (1, 0)])
def test_a_state_of_an_impossible_round_drops_its_client(tmp_path, monkeypatch, caplog, rounds):
    """Checkpoints contain these rounds, and one with an impossible round cannot be used."""
    federation = Federation(tmp_path, *FEDU)
    federation.run(1)
    original = ClientUpdate.to_content

    def to_content(update, *args):
        return original(replace(update, state_rounds=rounds) if update.partition_id == 1 else update, *args)

    monkeypatch.setattr(ClientUpdate, "to_content", to_content)
    federation.run(1)
    reason = f"it loaded a state of round {rounds[0]} and has one of round {rounds[1]} after round 2"
    assert federation.report.dropped == {1: reason}
    assert federation.state.state_rounds == {0: 2, 2: 2}
    if rounds != (2, 2):  # which is possible in round 3
        exchange, request = ClientMessenger(federation.grid), PersonalizedModelRequest()
        encoders = request_personalized_encoders(exchange, federation.components, federation.state, [0, 1], request)
        assert [client for client, _, _ in encoders] == [0]
        assert "client 1 returned no encoder: it loaded a state of" in caplog.text
