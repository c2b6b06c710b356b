"""Reading of checkpoints: formats, nested dictionaries, statistics, and rejected files, whose code is not run."""

import argparse
import os
import pickle
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedssl.datasets.raster import pixel_metadata
from fedssl.encoders import conv_small, vit_tiny
from fedssl.errors import InputError
from fedssl.export import read_content, save_encoder
from fedssl.export.cli import run as export
from fedssl.export.weights import write_safetensors
from fedssl.pretrained.checkpoints import read_checkpoint
from fedssl.pretrained.loading import initial_pixels, initial_statistics, load_pretrained
from tests.fedssl.test_safe_io import Calls

WEIGHT = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("legacy", [False, True])
def test_nested_dictionaries_become_dotted_names(legacy, tmp_path):
    content = {
        "state_dict": {"fc.weight": WEIGHT, "fc.bias": nn.Parameter(WEIGHT[0])},
        "optimizer": {"state": {0: {"step": 3, "exp_avg": WEIGHT}}, "param_groups": [{"lr": 0.1}]},
        "args": argparse.Namespace(arch="resnet50", epochs=800),
        "epoch": 100,
    }
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)
    tensors = read_checkpoint(tmp_path / "a.pth").tensors
    assert list(tensors) == ["state_dict.fc.weight", "state_dict.fc.bias", "optimizer.state.0.exp_avg"]
    assert torch.equal(tensors["state_dict.fc.weight"], WEIGHT)


def test_statistics_of_encoder_files(tmp_path):
    settings = {"_target_": "fedssl.encoders.conv_small", "channels": 1, "size": 8, "width": 4}
    encoder = conv_small(channels=1, size=8, width=4)
    save_encoder(tmp_path / "encoder.pt", encoder, settings=settings, mean=[0.3], std=[0.2], metadata={})
    write_safetensors(tmp_path / "encoder.safetensors", read_content(tmp_path / "encoder.pt"))
    for name, prefix in (("encoder.pt", "weights."), ("encoder.safetensors", "")):
        checkpoint = read_checkpoint(tmp_path / name)
        assert (checkpoint.mean, checkpoint.std) == ((0.3,), (0.2,))
        assert {name.removeprefix(prefix) for name in checkpoint.tensors} == encoder.state_dict().keys()


def test_encoder_files_state_heads_statistics_and_pixels(tmp_path):
    settings = {"_target_": "fedssl.encoders.vit_tiny", "channels": 1, "size": 8, "depth": 1, "width": 24, "heads": 6}
    build = partial(vit_tiny, channels=1, size=8, depth=1, width=24)
    metadata = pixel_metadata({"window": [-1000, 3000]})
    save_encoder(tmp_path / "encoder.pt", build(heads=6), settings=settings, mean=[0.3], std=[0.2], metadata=metadata)
    for form in ("safetensors", "timm", "huggingface"):
        export([f"encoder={tmp_path / 'encoder.pt'}", f"format={form}"])
    for name in ("encoder.pt", "encoder.safetensors", "encoder.timm.safetensors", "encoder-huggingface"):
        source = str(tmp_path / name)
        load_pretrained(build(heads=6), source)
        with pytest.raises(InputError, match="with 6 attention heads, and the encoder has 3; set encoder.heads=6"):
            load_pretrained(build(heads=3), source)
        assert initial_statistics(source, channels=1) == {"mean": (0.3,), "std": (0.2,)}
        assert initial_pixels(source)["window"] == [-1000, 3000]


@pytest.mark.parametrize("legacy", [False, True])
def test_code_is_not_run(legacy, tmp_path):
    marker = tmp_path / "marker"
    content = {"weight": WEIGHT, "x": Calls(os.mkdir, str(marker))}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Calls(os.mkdir, str(marker))))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(InputError, match="has more than tensors and plain values .*store its state dict alone"):
            read_checkpoint(tmp_path / name)
    assert not marker.exists()


def repeated():
    value = ["x"]
    for _ in range(25):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"a": torch.ones(1).expand(10**12)}, "a tensor is larger than the file"),
        ({"a": WEIGHT, "x": repeated()}, "its values are referenced too often"),
        ({"a": torch.ones(2, 2).to_sparse()}, "it names torch._utils _rebuild_sparse_tensor"),
        ({"a": WEIGHT, "x": b"bytes"}, "which is not a tensor"),
        ({"a": WEIGHT, "x": {1, 2}}, "which is not a tensor"),
    ],
)
def test_files_before_zip_files_get_the_same_checks(content, reason, tmp_path):
    for legacy in (True, False):
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(InputError, match=reason) as caught:
            read_checkpoint(tmp_path / "a.pt")
        assert "weights_only" not in str(caught.value)


def test_storages_of_files_before_zip_files_are_in_the_file(tmp_path):
    torch.save({"a": torch.zeros(1000)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "a.pt").read_bytes()
    key = whole.rindex(b"]q\x00X")
    without_keys = whole[:key] + b"]q\x00." + whole[whole.index(b".", key + 20) + 1 :]  # else memory is not initialized
    longer = whole.replace(b"M\xe8\x03", b"\x8a\x05\x00\x00\x00\x00\x10")  # 1000 becomes 2^36
    for content in (without_keys, longer, whole[:-8], whole + bytes(8)):
        (tmp_path / "a.pt").write_bytes(content)
        with pytest.raises(InputError, match="is damaged or has more than tensors") as caught:
            read_checkpoint(tmp_path / "a.pt")
        assert "\n" not in str(caught.value)


def test_the_factors_of_lora_are_no_encoder(tmp_path):
    save_file({"a": WEIGHT}, tmp_path / "adapter.safetensors", {"fedssl": "[[1, 2]]"})
    for read in (read_checkpoint, read_content):
        with pytest.raises(InputError, match=r"low-rank factors of a run with tuning=lora.*give the encoder\.pt"):
            read(tmp_path / "adapter.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.pt", None, "does not exist; set it to a checkpoint or a run folder"),
        ("text.pt", b"no checkpoint", "is damaged or has more than tensors"),
        ("text.safetensors", b"no checkpoint", "is damaged or has more than tensors"),
        ("empty.pt", b"", "is damaged or has more than tensors"),
        ("lfs.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull$"),
        ("page.pth", b"\xef\xbb\xbf\n<!doctype html><html></html>", "is a web page; download the file again$"),
    ],
)
def test_files_that_are_not_checkpoints(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_checkpoint(tmp_path / name)


def test_other_files_have_no_statistics(tmp_path):
    save_file({"weight": WEIGHT}, tmp_path / "a.safetensors")
    torch.save({"weight": WEIGHT, "mean": [0.3], "std": [0.2]}, tmp_path / "a.pt")  # not an encoder's file
    for name in ("a.safetensors", "a.pt"):
        checkpoint = read_checkpoint(tmp_path / name)
        assert (checkpoint.mean, checkpoint.std) == (None, None)
        assert torch.equal(checkpoint.tensors["weight"], WEIGHT)
