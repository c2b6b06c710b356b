import numpy as np
import pytest

from fedssl.errors import InputError
from server_app.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint, saved_rounds


def checkpoint(round):
    layers = {"weight": np.full((1000,), round, dtype=np.float32), "counter": np.array(round, dtype=np.int64)}
    return Checkpoint(round, layers)


def test_round_trip_keeps_dtypes_and_shapes(tmp_path):
    save_checkpoint(tmp_path, checkpoint(3), keep=2)
    back = latest_checkpoint(tmp_path)
    assert back.round == 3
    for name, array in checkpoint(3).layers.items():
        assert np.array_equal(back.layers[name], array)
        assert back.layers[name].dtype == array.dtype
        assert back.layers[name].shape == array.shape


def test_only_the_newest_are_left(tmp_path):
    for round in (1, 2, 3, 4):
        save_checkpoint(tmp_path, checkpoint(round), keep=2)
    assert saved_rounds(tmp_path) == [3, 4]
    assert len(list(tmp_path.iterdir())) == 4


def test_no_checkpoint_yet(tmp_path):
    assert latest_checkpoint(tmp_path / "missing") is None


@pytest.mark.parametrize("damage", ["cut", "flip", "lost sum"])
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
        newest.with_suffix(".sha256").unlink()
    assert latest_checkpoint(tmp_path).round == 1
    assert "round-000002.pt is damaged" in caplog.text


def test_all_damaged_is_an_error_not_a_new_start(tmp_path):
    save_checkpoint(tmp_path, checkpoint(1), keep=2)
    (tmp_path / "round-000001.pt").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="all checkpoints .* damaged"):
        latest_checkpoint(tmp_path)
