import resource
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from client_app.state_store import load_state, read_state, save_state


def state(value):
    return {"target.weight": torch.full((2,), float(value))}


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
    states = [
        {"a": torch.zeros(4)},
        {"b": torch.zeros(4)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4, dtype=torch.int32)},
        {"a": torch.zeros(4), "b": torch.zeros(0)},
    ]
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
    [
        *(cut, flipped, renamed, longer, header_of_another_length, without_checksum),
        *(lambda content: b"", lambda content: bytes(128)),
    ],
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
    ignored = signal.signal(
        signal.SIGXFSZ, signal.SIG_IGN
    )  # a write beyond the limit is an error then, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_state(tmp_path, {"target.weight": torch.zeros(10_000)}, round=2, oldest_resumable=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert rounds(tmp_path) == ["round-000001.safetensors"]
