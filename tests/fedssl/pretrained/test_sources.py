"""Names of sources, and the caches of timm, torchvision and the Hugging Face Hub, without a network."""

import json

import httpx
import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub.errors import RemoteEntryNotFoundError
from safetensors.torch import save_file
from torchvision import models

from fedssl.encoders import conv_small
from fedssl.errors import InputError
from fedssl.export import save_encoder
from fedssl.pretrained import sources
from fedssl.pretrained.sources import absolute_source, file_of, read_source

COMMIT = "0" * 40


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An offline Hub with an empty cache; returns a function that puts a file into the cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def put(repository, name, write):
        folder = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
        snapshot = folder / "snapshots" / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(COMMIT)
        write(snapshot / name)

    return put


def test_files_and_run_folders(tmp_path, monkeypatch):
    settings = {"_target_": "fedssl.encoders.conv_small", "channels": 1, "size": 8, "width": 4}
    encoder = conv_small(channels=1, size=8, width=4)
    save_encoder(tmp_path / "encoder.pt", encoder, settings=settings, mean=[0.3], std=[0.2], metadata={})
    monkeypatch.chdir(tmp_path)
    for source in ("encoder.pt", "."):
        path = absolute_source(source)
        assert file_of(path).is_absolute()
        checkpoint = read_source(path)
        assert checkpoint.mean == (0.3,)
        assert torch.equal(checkpoint.tensors["weights.blocks.0.0.weight"], encoder.state_dict()["blocks.0.0.weight"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty is a folder without encoder.pt"):
        read_source(absolute_source("empty"))
    save_file({"weight": torch.ones(2)}, tmp_path / "empty" / "model.safetensors")
    assert read_source(absolute_source("empty")).tensors["weight"].tolist() == [1, 1]
    (tmp_path / "a:b").mkdir()
    assert absolute_source("a:b") == str(tmp_path / "a:b")  # an existing path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tim:resnet18", "has the unknown prefix tim.*did you mean timm"),
        ("http://host/weights.pt", "is an address; download the file"),
        ("s3:bucket", "has the unknown prefix s3.*timm:NAME, torchvision:NAME or hf:REPO"),
        ("", "encoder.weights is empty"),
    ],
)
def test_unknown_sources(source, message):
    with pytest.raises(InputError, match=message):
        absolute_source(source)


def test_timm_from_the_cache(hub):
    assert absolute_source("timm:test_vit") == "timm:test_vit"
    assert file_of("timm:test_vit") is None
    tensors = {name: value + 1 for name, value in timm.create_model("test_vit").state_dict().items()}
    hub("timm/test_vit.r160_in1k", "model.safetensors", lambda file: save_file(tensors, file))
    for name in ("test_vit", "test_vit.r160_in1k"):
        checkpoint = read_source(f"timm:{name}")
        assert checkpoint.tensors.keys() == tensors.keys()
        assert all(torch.equal(checkpoint.tensors[key], value) for key, value in tensors.items())
        assert (checkpoint.mean, checkpoint.std) == ((0.5,) * 3, (0.5,) * 3)


def test_a_repository_from_the_cache(hub):
    hub("somebody/network", "model.safetensors", lambda file: save_file({"weight": torch.ones(2)}, file))
    checkpoint = read_source("hf:somebody/network")
    assert checkpoint.tensors["weight"].tolist() == [1, 1]
    assert checkpoint.mean is None
    config = {"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [1, 2, 3]}}
    hub("somebody/network", "config.json", lambda file: file.write_text(json.dumps(config)))
    checkpoint = read_source("hf:somebody/network")
    assert (checkpoint.mean, checkpoint.std) == ((0.1, 0.2, 0.3), (1, 2, 3))
    hub("somebody/network", "config.json", lambda file: file.write_text("[{}]"))
    assert read_source("hf:somebody/network").mean is None


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ("timm:test_vit", "https://huggingface.co/timm/test_vit.r160_in1k/resolve/main/model.safetensors"),
        ("hf:somebody/network", "https://huggingface.co/somebody/network/resolve/main/model.safetensors"),
    ],
)
def test_an_offline_hub(hub, source, url):
    with pytest.raises(InputError, match=f"not in the cache and cannot be .*download {url} elsewhere, and"):
        read_source(source)


def test_a_repository_without_safetensors(hub, monkeypatch):
    def download(*arguments, **options):
        raise RemoteEntryNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "https://x")))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(InputError, match="somebody/network has no model.safetensors; download .* pytorch_model.bin"):
        read_source("hf:somebody/network")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("timm:resnet19", "is not a model of timm .*did you mean resnet18"),
        ("timm:test_vit.other", "is not a model of timm .*did you mean test_vit"),
        ("timm:test_vit4", "has no weights on the Hugging Face Hub"),
        ("torchvision:resnet19", "is not a model of torchvision.*did you mean"),
        ("torchvision:ResNet18_Weights.V9", "is not a model of torchvision; an entry has the form ResNet50_W"),
        ("torchvision:resnet50.IMAGENET1K_V2", "is not a model of torchvision; an entry has the form ResNet50_W"),
        ("hf:a/b/c", "cannot be downloaded"),
    ],
)
def test_unknown_models(hub, source, message):
    with pytest.raises(InputError, match=message):
        read_source(source)


def test_weights_of_detection_have_no_statistics(hub, tmp_path, monkeypatch):
    weights = models.get_model_weights("fasterrcnn_resnet50_fpn")["DEFAULT"]
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.save(
        {"backbone.body.conv1.weight": torch.zeros(1)}, tmp_path / "checkpoints" / weights.url.rpartition("/")[2]
    )
    checkpoint = read_source("torchvision:fasterrcnn_resnet50_fpn")
    assert (list(checkpoint.tensors), checkpoint.mean, checkpoint.std) == (["backbone.body.conv1.weight"], None, None)


def test_readers_and_documented_prefixes_agree():
    assert list(sources._READERS) == ["timm", "torchvision", "hf"]
