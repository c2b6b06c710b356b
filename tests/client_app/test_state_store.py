"""What clients of one process keep: in memory, and in files that are written behind."""

import threading
import time

import pytest
import torch

from client_app import state_store as module
from client_app.state_store import FILE_STORE, WriteBehind, load_state, save_state
from fedssl.errors import RunError
from server_app.callbacks.checkpoints import Checkpoints
from server_app.checkpoint import latest_checkpoint
from simulation.grid import LocalGrid
from simulation.run import run
from tests.runs import SMALL, UNTESTED, model_bits

LIKE = {"target.weight": torch.zeros(2)}
SIZE = 8  # bytes of such a state
WAIT = 60


def state(value):
    return {"target.weight": torch.full((2,), float(value))}


def value(found):
    return None if found is None else float(found.tensors["target.weight"][0])


def contents(folder):
    """Of all files of states."""
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*.safetensors")}


@pytest.fixture
def store():
    with WriteBehind() as store:
        yield store


@pytest.fixture
def slow(monkeypatch):
    """Writing waits for this event."""
    event = threading.Event()

    def waits(*given, **named):
        assert event.wait(WAIT)
        save_state(*given, **named)

    monkeypatch.setattr(module, "save_state", waits)
    yield event
    event.set()


def test_what_is_saved_is_there_before_it_is_written(tmp_path, store, slow):
    held = state(3)
    store.save(tmp_path / "0", held, round=3, oldest_resumable=0)
    assert store.load(tmp_path / "0", before=4, template=LIKE).tensors is held
    assert not (tmp_path / "0").exists()
    slow.set()
    store.flush()
    assert value(load_state(tmp_path / "0", before=4)) == 3


def test_it_answers_as_files_do(tmp_path, store):
    """Any order of rounds: new ones, one that is run again, one before which nothing was kept, another client."""
    saved = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 5, 2), (0, 5, 2), (1, 6, 5)]
    for step, (client, round, oldest_resumable) in enumerate(saved):
        for kind, folder in ((store, tmp_path / "memory"), (FILE_STORE, tmp_path / "files")):
            kind.save(folder / str(client), state(step), round=round, oldest_resumable=oldest_resumable)
        for before in range(8):
            for asked in "012":
                found = store.load(tmp_path / "memory" / asked, before=before, template=LIKE)
                assert value(found) == value(FILE_STORE.load(tmp_path / "files" / asked, before=before, template=LIKE))
    store.flush()
    assert contents(tmp_path / "memory") == contents(tmp_path / "files") != {}


def test_memory_is_bounded_and_what_makes_room_is_written_first(tmp_path, monkeypatch):
    read = []

    def noted(folder, **given):
        read.append(folder.name)
        return load_state(folder, **given)

    monkeypatch.setattr(module, "load_state", noted)
    with WriteBehind(max_bytes=2 * SIZE) as store:
        for client in range(4):
            store.save(tmp_path / str(client), state(client), round=1, oldest_resumable=0)
        assert [value(store.load(tmp_path / str(client), before=2, template=LIKE)) for client in range(4)] == [
            0,
            1,
            2,
            3,
        ]
        assert read == ["0", "1"]
        store.save(tmp_path / "2", state(9), round=2, oldest_resumable=0)  # replaces the state of this client only
        store.load(tmp_path / "3", before=2, template=LIKE)
        assert read == ["0", "1"]


RUN = [*SMALL, *UNTESTED, "method=byol", "strategy=fedu", "num_clients=3", "rounds=2", "engine=local"]


def test_a_checkpoint_finds_all_states_written(tmp_path, monkeypatch):
    """However slow the disk is, what a run that goes on from the checkpoint needs is on it."""
    clients, checkpoint, found = tmp_path / "run" / "clients", Checkpoints.save, []

    def slow(folder, state, **given):
        time.sleep(0.1)
        save_state(folder, state, **given)

    def looks(self):
        state = f"round-{len(found) + 1:06d}.safetensors"
        found.append([(clients / "0000" / client / state).exists() for client in "012"])
        checkpoint(self)

    monkeypatch.setattr(module, "save_state", slow)
    monkeypatch.setattr(Checkpoints, "save", looks)
    run([*RUN, f"output_dir={tmp_path / 'run'}"])
    assert found == [[True] * 3] * 2


@pytest.mark.parametrize("overrides", [[], pytest.param(["strategy=per_ssl"], marks=pytest.mark.heavy)])
def test_the_numbers_are_those_of_files_alone(tmp_path, monkeypatch, overrides):
    """States in memory are what was kept, although the next client trains in the same model."""
    run([*RUN, *overrides, f"output_dir={tmp_path / 'one'}"])
    init = LocalGrid.__init__

    def files_alone(self, client_app, *, num_clients, store):
        init(self, client_app, num_clients=num_clients)

    monkeypatch.setattr(LocalGrid, "__init__", files_alone)
    run([*RUN, *overrides, f"output_dir={tmp_path / 'two'}"])
    assert model_bits(tmp_path / "one") == model_bits(tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two") != {}


def test_a_full_disk_ends_the_run_which_resumes(tmp_path, monkeypatch):
    def full(folder, state, *, round, oldest_resumable):
        if round == 2:
            raise OSError(28, "No space left on device")
        save_state(folder, state, round=round, oldest_resumable=oldest_resumable)

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_state", full)
        with pytest.raises(RunError, match="No space left on device.*free disk space, then continue with fedssl"):
            run([*RUN, f"output_dir={tmp_path / 'cut'}"])
    assert latest_checkpoint(tmp_path / "cut" / "checkpoints").round == 1
    run([f"resume={tmp_path / 'cut'}"])
    run([*RUN, f"output_dir={tmp_path / 'all'}"])
    assert model_bits(tmp_path / "cut") == model_bits(tmp_path / "all")
