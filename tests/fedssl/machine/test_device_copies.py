"""Flat copies: values, shapes and dtypes survive, and there is one buffer per dtype."""

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.machine import device_copies
from fedssl.machine.device_copies import copy_from_cpu, copy_to_cpu
from fedssl.methods.base import build_method
from fedssl.model_arrays import (
    clone_tensors,
    copy_layers,
    exchanged_layers,
    exchanged_names,
    load_layers,
    move_layers_out,
    read_layers,
    read_once,
)
from tests.gpu_stand_in import treat_cpu_as_gpu


@pytest.fixture
def buffers(monkeypatch):
    """Treat the CPU as a GPU, and return the sizes and dtypes of the buffers of all copies."""
    treat_cpu_as_gpu(monkeypatch)
    sizes = []

    def buffer(size, dtype):
        sizes.append((size, dtype))
        return torch.full((size,), 77, dtype=dtype)

    monkeypatch.setattr(device_copies, "pinned_buffer", buffer)
    return sizes


def tensors():
    """Several dtypes in turn, a scalar, an empty tensor, and the layout of convolutions on a GPU."""
    kernel = torch.arange(48.0).view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last)
    counters = [torch.tensor(7), torch.arange(3)]
    return [kernel, counters[0], torch.tensor(2.5), torch.arange(4).half(), torch.zeros(0, 3), counters[1]]


EXPECTED = [(48 + 1 + 0, torch.float32), (1 + 3, torch.int64), (4, torch.float16)]


def test_values_arrive_in_one_buffer_per_dtype(buffers):
    sources = tensors()
    found = copy_to_cpu(sources)
    assert buffers == EXPECTED
    for copied, source in zip(found, sources, strict=True):
        assert copied.is_contiguous()
        assert copied.dtype == source.dtype
        assert torch.equal(copied, source)
        assert copied.numel() == 0 or copied.data_ptr() != source.data_ptr()


def test_values_are_copied_into_tensors_of_any_layout(buffers):
    targets = [torch.empty_like(tensor) for tensor in tensors()]
    layouts = [target.stride() for target in targets]
    addresses = [target.data_ptr() for target in targets]
    # `copy_from_cpu` converts to the dtype of the target, as `Tensor.copy_` does.
    copy_from_cpu(targets, [tensor.double() for tensor in tensors()])
    assert buffers == EXPECTED
    assert [target.stride() for target in targets] == layouts
    assert [target.data_ptr() for target in targets] == addresses
    assert all(torch.equal(target, tensor) for target, tensor in zip(targets, tensors(), strict=True))


@pytest.fixture
def method(buffers):
    method = build_method(compose(["dataset=digits", "encoder.width=4", "method=byol"]).model)
    assert not buffers
    return method


def test_a_model_is_read_once_inside_the_block(method, buffers):
    names = [name for name in method.named_tensors if not name.startswith("predictor.")]
    direct = {name: value.detach().clone() for name, value in method.named_tensors.items()}
    with read_once(method, names):
        assert len(buffers) == 2  # float32 and the counters of batch normalization
        state, upload = clone_tensors(method, names), move_layers_out(method, names)
        seen = read_layers(method, names)
        assert len(buffers) == 2
        rest = copy_layers(method, method.named_tensors)  # the predictor was not among the names
        assert len(buffers) == 4
    assert all(torch.equal(state[name], direct[name]) for name in names)
    assert all((upload[name] == seen[name]).all() and (upload[name] == state[name].numpy()).all() for name in names)
    assert rest.keys() == direct.keys()
    # What is kept shares no memory: another client's model is in these buffers next.
    kept = [state[name].data_ptr() for name in names] + [upload[name].ctypes.data for name in names]
    assert len(set(kept)) == len(kept)
    assert all(array.base is None or array.base.nbytes == array.nbytes for array in upload.values())


def test_after_the_block_the_model_is_read_again(method):
    with read_once(method, method.named_tensors):
        pass
    method.named_tensors["predictor.0.weight"].data.fill_(3)
    assert (copy_layers(method, ["predictor.0.weight"])["predictor.0.weight"] == 3).all()


def test_a_model_is_loaded_in_one_copy_per_dtype(method, buffers):
    layers = {name: np.asarray(array + 1) for name, array in exchanged_layers(method).items()}
    buffers.clear()
    load_layers(method, layers)
    assert {dtype for _, dtype in buffers} == {torch.float32, torch.int64}
    assert len(buffers) == 2
    found = copy_layers(method, exchanged_names(method))
    assert all((found[name] == array).all() for name, array in layers.items())
