"""Client state in files, and in the memory of one process that writes it later."""

import resource
import signal
import threading
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from client_app import state_store as module
from client_app.state_store import FILE_STORE, WriteBehind, load_state, read_state, save_state
from fedssl.errors import RunError
from server_app.callbacks.models import Checkpoints
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
        found = [value(store.load(tmp_path / str(client), before=2, template=LIKE)) for client in range(4)]
        assert found == [0, 1, 2, 3]
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


def rounds(folder):
    return sorted(file.name for file in folder.iterdir())


def test_a_resumed_round_sees_what_was_kept_before_it(tmp_path):
    for round in (1, 2, 5):
        save_state(tmp_path, state(round), round=round, oldest_resumable=0)
    for before, expected in ((2, 1), (3, 2), (5, 2), (6, 5)):
        assert load_state(tmp_path, before=before).tensors["target.weight"][0] == expected
    assert load_state(tmp_path, before=1) is None


def test_versions_that_no_resume_can_ask_for_are_dropped(tmp_path):
    for round in (1, 3, 4):
        save_state(tmp_path, state(round), round=round, oldest_resumable=0)
    # A run that goes back to round 3 at the earliest needs the versions after 3 and 4, not the one after 1.
    save_state(tmp_path, state(6), round=6, oldest_resumable=3)
    assert rounds(tmp_path) == ["round-000003.safetensors", "round-000004.safetensors", "round-000006.safetensors"]


ALL_KINDS = {
    "weight": torch.randn(3, 2, 5, 5).contiguous(memory_format=torch.channels_last),
    "half": torch.randn(7).bfloat16(),
    "counter": torch.tensor(3),
    "yes": torch.tensor([True, False, True]),
    "double": torch.tensor(-0.0, dtype=torch.float64),
    "nothing": torch.empty(0, 4),
    "not a number": torch.tensor([float("nan"), float("inf")]),
    "bytes": torch.arange(65, dtype=torch.uint8),
}


def bits(value):
    return value.contiguous().flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("read", [read_state, load_file])
def test_every_bit_name_and_shape_comes_back(tmp_path, read):
    """By this project and by the library."""
    save_state(tmp_path, ALL_KINDS, round=1, oldest_resumable=0)
    back = read(tmp_path / "round-000001.safetensors")
    assert back.keys() == ALL_KINDS.keys()
    for name, value in ALL_KINDS.items():
        assert (back[name].dtype, back[name].shape, bits(back[name])) == (value.dtype, value.shape, bits(value))


def test_names_dtypes_and_shapes_are_part_of_the_checksum(tmp_path):
    states = [{"a": torch.zeros(4)}, {"b": torch.zeros(4)}, {"a": torch.zeros(2, 2)}]
    states += [{"a": torch.zeros(4, dtype=torch.int32)}, {"a": torch.zeros(4), "b": torch.zeros(0)}]
    checksums = set()
    for round, state in enumerate(states, 1):
        save_state(tmp_path, state, round=round, oldest_resumable=0)
        with safe_open(tmp_path / f"round-{round:06d}.safetensors", "pt") as stored:
            checksums.add(stored.metadata()["checksum"])
    assert len(checksums) == len(states)


def test_a_state_in_memory_survives_changes_of_its_file(tmp_path):
    save_state(tmp_path, state(1), round=1, oldest_resumable=0)
    first = load_state(tmp_path, before=2)
    save_state(tmp_path, state(9), round=1, oldest_resumable=0)
    assert first.tensors["target.weight"].tolist() == [1, 1]
    again = load_state(tmp_path, before=2)
    save_state(tmp_path, state(3), round=3, oldest_resumable=3)
    save_state(tmp_path, state(4), round=4, oldest_resumable=3)
    assert rounds(tmp_path) == ["round-000003.safetensors", "round-000004.safetensors"]
    assert again.tensors["target.weight"].tolist() == [9, 9]


def cut(content):
    return content[:-64]


def flipped(content):
    return bytes([*content[:-50], content[-50] ^ 1, *content[-49:]])  # in a tensor


def renamed(content):
    return content.replace(b"target.weight", b"parget.weight")


def longer(content):
    return content + bytes(64)


def header_of_another_length(content):
    return (192).to_bytes(8, "little") + content[8:]


def without_checksum(content):
    return content.replace(b"checksum", b"checkmum")


@pytest.mark.parametrize(
    "damage",
    [cut, flipped, renamed, longer, header_of_another_length, without_checksum, lambda _: b"", lambda _: bytes(128)],
)
def test_a_damaged_state_is_named_and_the_one_before_used(tmp_path, caplog, damage):
    many = {"target.weight": torch.arange(1000.0), "target.bias": torch.zeros(3)}
    save_state(tmp_path, state(1), round=1, oldest_resumable=0)
    save_state(tmp_path, many, round=2, oldest_resumable=0)
    file = tmp_path / "round-000002.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert load_state(tmp_path, before=3).tensors["target.weight"].tolist() == [1, 1]
    assert "round-000002.safetensors is damaged" in caplog.text


def test_a_failed_write_reaches_the_caller_and_leaves_nothing(tmp_path):
    save_state(tmp_path, state(1), round=1, oldest_resumable=0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_state(tmp_path, {"target.weight": torch.zeros(10_000)}, round=2, oldest_resumable=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert rounds(tmp_path) == ["round-000001.safetensors"]
