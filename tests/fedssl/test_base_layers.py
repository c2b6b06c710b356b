"""Base layers: their digest, and files that are intact or not."""

import hashlib
import os

import numpy as np
import pytest
import torch

from fedssl.base_layers import KEPT, check_base, layers_digest, load_base, save_base, stored_digests

BASE = {"encoder.b": np.arange(6, dtype=np.float32).reshape(2, 3), "encoder.a": np.array(3, dtype=np.int64)}
BASE["encoder.c"] = np.zeros((0, 2), dtype=np.float32)
LIKE = {name: torch.from_numpy(array.copy()) for name, array in BASE.items()}
DIGEST = layers_digest(BASE)


def test_the_digest_is_that_of_names_dtypes_shapes_and_values():
    text = b"encoder.a <i8 ()\n" + (3).to_bytes(8, "little") + b"encoder.b <f4 (2, 3)\n"
    text += np.arange(6, dtype="<f4").tobytes() + b"encoder.c <f4 (0, 2)\n"
    assert hashlib.sha256(text).hexdigest() == DIGEST
    assert layers_digest(dict(sorted(BASE.items()))) == DIGEST
    assert layers_digest({**BASE, "encoder.b": np.asfortranarray(BASE["encoder.b"])}) == DIGEST


@pytest.mark.parametrize(
    "changed",
    [
        {"encoder.b": BASE["encoder.b"] + 1},
        {"encoder.b": BASE["encoder.b"].reshape(3, 2)},
        {"encoder.b": BASE["encoder.b"].view(np.int32)},
        {"encoder.d": BASE["encoder.a"]},
    ],
)
def test_the_digest_changes_with_the_layers(changed):
    assert layers_digest({**BASE, **changed}) != DIGEST


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({name: BASE[name] for name in ("encoder.a", "encoder.c")}, "they lack encoder.b"),
        ({**BASE, "encoder.d": BASE["encoder.a"]}, "they have encoder.d"),
        ({**BASE, "encoder.b": BASE["encoder.b"].T}, r"encoder.b is torch.float32 \(3, 2\) instead of"),
        ({**BASE, "encoder.b": BASE["encoder.b"].astype(np.float64)}, "encoder.b is torch.float64"),
        ({**BASE, "encoder.b": np.full((2, 3), np.nan, np.float32)}, "encoder.b has values that are not finite"),
        ({**BASE, "encoder.b": BASE["encoder.b"] + 1}, "their digest is not"),
    ],
)
def test_other_layers_are_refused(base, message):
    check_base(BASE, like=LIKE, digest=DIGEST)
    with pytest.raises(ValueError, match=message):
        check_base(base, like=LIKE, digest=DIGEST)


def test_files_are_written_once_and_read_from_any_folder(tmp_path):
    own, other = tmp_path / "states" / "base", tmp_path / "owner"
    assert load_base([own, other], like=LIKE, digest=DIGEST) is None
    assert stored_digests([own, other]) == ()
    save_base(other, BASE, digest=DIGEST)
    changed = (other / f"{DIGEST}.safetensors").stat().st_mtime_ns
    save_base(other, BASE, digest=DIGEST)
    assert (other / f"{DIGEST}.safetensors").stat().st_mtime_ns == changed
    loaded = load_base([own, other], like=LIKE, digest=DIGEST)
    assert layers_digest(loaded) == DIGEST
    assert stored_digests([own, other, other]) == (DIGEST,)


@pytest.mark.parametrize("damage", ["cut", "changed", "other", "folder"])
def test_damaged_files_are_ignored(tmp_path, damage, caplog):
    file = tmp_path / f"{DIGEST}.safetensors"
    save_base(tmp_path, BASE, digest=DIGEST)
    content = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    elif damage == "other":
        file.unlink()
        save_base(tmp_path, {"encoder.a": BASE["encoder.a"]}, digest=DIGEST)
    else:
        file.write_bytes(content[:-3] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    assert load_base([tmp_path], like=LIKE, digest=DIGEST) is None
    assert "is damaged" in caplog.text
    assert stored_digests([tmp_path]) == ()


def test_the_newest_files_are_kept(tmp_path):
    other, digests = tmp_path / "notes.safetensors", []  # not the name of a digest
    other.write_bytes(b"")
    for number in range(KEPT + 2):
        base = {**BASE, "encoder.a": np.array(number, dtype=np.int64)}
        digests.append(layers_digest(base))
        save_base(tmp_path, base, digest=digests[-1])
        os.utime(tmp_path / f"{digests[-1]}.safetensors", (number, number))
        assert {file.stem for file in tmp_path.iterdir()} == {*digests[-KEPT:], "notes"}
    assert stored_digests([tmp_path]) == tuple(reversed(digests[-KEPT:]))
