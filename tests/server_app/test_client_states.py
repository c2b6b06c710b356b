"""Client states beyond ``client_state.max_bytes`` are evicted, and their clients start again without one."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from client_app.state_store import save_state
from fedssl.atomic_files import round_file, saved_rounds
from fedssl.runs.manifest import ClientStateParts, client_folder
from fedssl.wire.messages import ClientUpdate
from server_app.client_states import ClientStates
from server_app.updates import RoundResult
from strategies.types import ServerState
from tests.federation import Federation


def save(folder, client, round, *, values=1000):
    target = client_folder(folder / "clients", client)
    save_state(target, {"a": torch.zeros(values)}, round=round, oldest_resumable=0)
    return (target / f"round-{round:06d}.safetensors").stat().st_size


def end_round(states, state, clients, *, oldest_resumable, dropped=()):
    """Return the state and the metrics after a round; the oldest checkpoint is of ``oldest_resumable``."""
    if oldest_resumable:
        states.checkpoints.mkdir(exist_ok=True)
        for file in states.checkpoints.iterdir():
            file.unlink()
        round_file(states.checkpoints, oldest_resumable).touch()
    rows = [SimpleNamespace(client=client) for client in clients]
    result = RoundResult(state.round, clients=rows, dropped=dict.fromkeys(dropped, "no reply in time"))
    state, result = states.end_round(state, result)
    return state, result.state_metrics


def after(round, last):
    """The state after a round, given each client's last participation."""
    participation = {client: (number, "global") for client, number in last.items()}
    return ServerState(round=round, last_participation=participation, state_rounds=dict(last))


def test_the_least_recently_used_are_evicted(tmp_path):
    size = save(tmp_path, 3, 1)
    for client in (2, 1):
        save(tmp_path, client, 1)
    save(tmp_path, 1, 2)  # an older version does not count
    states = ClientStates(tmp_path, 2 * size)
    state, metrics = end_round(states, after(2, {3: 1, 2: 1, 1: 2}), [1], oldest_resumable=0)
    assert metrics == {"state_bytes": 2 * size, "evicted_states": 1}
    assert state.evicted == {2: 2}  # of the two of round 1 that with the smaller id
    assert state.state_rounds == {3: 1, 1: 2}
    assert state.last_participation == {3: (1, "global"), 1: (2, "global")}
    save(tmp_path, 0, 3, values=2000)
    state = replace(after(3, {3: 1, 1: 2, 0: 3}), evicted=state.evicted)
    state, _ = end_round(states, state, [0], oldest_resumable=1)
    assert state.evicted == {2: 2, 3: 3, 1: 3}
    assert list(state.state_rounds) == [0]
    assert saved_rounds(client_folder(tmp_path / "clients", 2), "safetensors") == [1]  # a checkpoint needs it
    state, metrics = end_round(states, replace(state, round=4), [], oldest_resumable=2)
    assert state.evicted == {2: 2, 3: 3, 1: 3}  # until they participate again
    assert not client_folder(tmp_path / "clients", 2).exists()
    assert metrics["evicted_states"] == 0


def test_a_client_that_still_trains_keeps_its_state(tmp_path):
    """Its plan of an earlier round does not name it among the evicted clients."""
    size = save(tmp_path, 3, 1)
    for client in (2, 1):
        save(tmp_path, client, client)
    states, messages = ClientStates(tmp_path, size), {"9": {"client": 3}}
    state = replace(after(2, {3: 1, 2: 2, 1: 1}), in_flight={"messages": messages})
    state, _ = end_round(states, state, [2], oldest_resumable=0)
    assert state.evicted == {1: 2, 2: 2}
    state, _ = end_round(states, replace(after(3, {3: 1}), evicted=state.evicted), [], oldest_resumable=0)
    assert state.evicted == {1: 2, 2: 2}


def test_a_resumed_run_measures_the_same(tmp_path):
    size = save(tmp_path, 0, 1)
    save(tmp_path / "clients" / "0000" / "0", 0, 1)  # a subfolder of the client
    save(tmp_path, 1, 1)
    first, resumed = ClientStates(tmp_path, None), ClientStates(tmp_path, None)
    _, metrics = end_round(first, after(1, {0: 1, 1: 1}), [0, 1], oldest_resumable=0)
    assert metrics == {"state_bytes": 3 * size, "evicted_states": 0}
    state = replace(after(2, {0: 1}), dropped={1: 1})  # in round 2, with the state that it saved
    larger = save(tmp_path, 1, 2, values=2000)
    for states in (first, resumed):
        metrics = {"state_bytes": 2 * size + larger, "evicted_states": 0}
        assert end_round(states, state, [], oldest_resumable=0, dropped=[1]) == (state, metrics)


def test_dropped_clients_count_and_are_evicted(tmp_path):
    """Client 0 was dropped after its update of round 3, and 1 before its first: 1 and 2 are used least recently."""
    size = save(tmp_path, 3, 5)
    for client in (2, 1, 0):
        save(tmp_path, client, 4)
    state = replace(after(5, {3: 5, 2: 2}), dropped={0: 3, 1: 0, 4: 0})  # client 4 has saved nothing
    states = ClientStates(tmp_path, 2 * size)
    state, metrics = end_round(states, state, [3], oldest_resumable=0, dropped=[1, 4])
    assert metrics == {"state_bytes": 2 * size, "evicted_states": 2}
    assert (state.evicted, state.dropped, state.last_participation) == ({1: 5, 2: 5}, {0: 3, 4: 0}, {3: (5, "global")})
    assert [state.last_used_round(client) for client in range(4)] == [3, 0, 0, 5]
    assert {Path(part.path).parent.name for part in states.parts(state)} == {"0", "3"}
    resumed = ClientStates(tmp_path, 2 * size)
    assert end_round(resumed, state, [], oldest_resumable=0)[0] == state
    end_round(states, replace(state, round=6), [], oldest_resumable=5)
    assert [client_folder(tmp_path / "clients", client).exists() for client in range(4)] == [True, False, False, True]


def test_what_an_evicted_client_saves_in_vain_is_deleted(tmp_path):
    """Its update is dropped, so that its next plan says evicted again. While it trains, its files stay."""
    size, folder = save(tmp_path, 0, 1), client_folder(tmp_path / "clients", 1)
    states = ClientStates(tmp_path, size)
    state = replace(after(1, {0: 1}), evicted={1: 1})
    end_round(states, state, [0], oldest_resumable=1)
    save(tmp_path, 1, 2)
    state = replace(state, round=2, dropped={1: 0})
    state, metrics = end_round(states, state, [], oldest_resumable=2, dropped=[1])
    assert (state.evicted, metrics) == ({1: 1}, {"state_bytes": size, "evicted_states": 0})
    assert not folder.exists()
    save(tmp_path, 1, 3)
    state = replace(state, round=3, in_flight={"messages": {"9": {"client": 1}}})
    for other in (states, ClientStates(tmp_path, size)):
        end_round(other, state, [], oldest_resumable=3)
        assert folder.exists()
    end_round(states, replace(state, in_flight={}), [], oldest_resumable=3, dropped=[1])
    assert not folder.exists()


def test_a_checkpoint_has_no_part_of_evicted_clients(tmp_path):
    for client in (0, 1000):
        save(tmp_path, client, 1)
        save_state(
            client_folder(tmp_path / "clients", client) / "frozen", {"a": torch.ones(1)}, round=1, oldest_resumable=0
        )
    parts = [part.path for part in ClientStateParts(tmp_path).up_to(1, without=[0])]
    name = "round-000001.safetensors"
    assert sorted(parts) == [f"clients/0001/1000/frozen/{name}", f"clients/0001/1000/{name}"]


@pytest.mark.parametrize("overrides", [["strategy=fedbn"], ["strategy=fedu", "method=byol"]])
def test_an_evicted_client_starts_without_a_state(tmp_path, overrides):
    federation = Federation(tmp_path, *overrides)
    federation.run(2)
    state = federation.state
    state_rounds = {client: round for client, round in state.state_rounds.items() if client != 1}
    federation.state = replace(state, state_rounds=state_rounds, evicted={1: 2})
    federation.updates.clear()
    federation.run(1)
    assert federation.report.dropped == {}
    loaded = [ClientUpdate.from_content(content, 0).state_rounds for content in federation.updates]
    state, _ = ClientStates(tmp_path, None).end_round(federation.state, federation.report)
    assert state.evicted == {}
    assert federation.state.state_rounds == {0: 3, 1: 3, 2: 3}
    assert loaded == [(2, 3), (0, 3), (2, 3)]
