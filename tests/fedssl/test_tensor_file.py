"""Files of tensors and arrays: what comes back, and what is refused."""

import io
import math
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedssl.tensor_file import read_arrays, read_tensor_file, write_arrays, write_tensor_file
from tests.fedssl.test_safe_io import archive

TENSORS = {
    "weight": torch.arange(6.0).view(2, 3).T,  # not contiguous
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "trained": torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("checked", [True, False])
def test_tensors_and_metadata_come_back(tmp_path, checked):
    """By this project and by the library."""
    file = tmp_path / "x.safetensors"
    write_tensor_file(file, TENSORS, metadata={"a": "b"}, checked=checked)
    tensors, metadata = read_tensor_file(file, checked=checked)
    assert metadata.pop("a") == "b"
    assert bool(metadata) == checked
    for back in (tensors, load_file(file)):
        assert back.keys() == TENSORS.keys()
        assert all(
            torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in TENSORS.items()
        )


def test_a_name_that_is_not_utf_8(tmp_path):
    file = tmp_path / os.fsdecode(b"\xe9.safetensors")
    write_tensor_file(file, TENSORS)
    assert read_tensor_file(file)[0].keys() == TENSORS.keys()


def test_files_of_the_library_are_read(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    tensors, metadata = read_tensor_file(tmp_path / "x.safetensors")
    assert (tensors["a"].tolist(), metadata) == ([1, 1], {})
    with pytest.raises(ValueError, match="the checksum is wrong"):
        read_tensor_file(tmp_path / "x.safetensors", checked=True)
    with pytest.raises(OSError, match="but the maximum is 3"):
        read_tensor_file(tmp_path / "x.safetensors", max_bytes=3)


def test_arrays_come_back(tmp_path):
    arrays = {"names": np.array(["a", "bc"]), "empty": np.zeros((0, 3)), "number": np.array(3)}
    write_arrays(tmp_path / "x.npz", arrays)
    back = read_arrays(tmp_path / "x.npz")
    assert back.keys() == arrays.keys()
    assert all(np.array_equal(back[name], array) and back[name].dtype == array.dtype for name, array in arrays.items())


def test_arrays_with_other_sizes_than_declared_are_refused(tmp_path):
    path = archive(tmp_path / "x.npz", {"a.npy": bytes(10**6)}, compressed=True)
    with pytest.raises(ValueError, match="compressed"):
        read_arrays(path)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    with pytest.raises(ValueError, match="has another size than it declares"):
        read_arrays(archive(path, {"a.npy": header.getvalue()}))
    np.savez(path, a=np.array([{"x": 1}], dtype=object))
    with pytest.raises(ValueError, match="has another size than it declares"):
        read_arrays(path)


def test_files_are_not_larger_than_their_tensors(tmp_path):
    write_tensor_file(tmp_path / "x.safetensors", {"a": torch.ones(10**4)})
    assert math.ceil((tmp_path / "x.safetensors").stat().st_size / 1000) == 41
