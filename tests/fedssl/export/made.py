"""Encoders for tests of exports, their images and their representations."""

from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor

from fedssl import encoders
from fedssl.export import load_encoder, save_encoder
from fedssl.export.source import ExportSource

SMALL = {"_target_": "fedssl.encoders.conv_small", "channels": 3, "size": 8, "width": 4}
VIT = {"_target_": "fedssl.encoders.vit_tiny", "channels": 3, "size": 8}
VIT |= {"patch": 4, "depth": 2, "width": 32, "heads": 2}
RESNET = {"_target_": "fedssl.encoders.resnet18", "channels": 3, "size": 16}
METADATA = {"method": "SimCLR", "rounds": 7}


def write_encoder(file: Path, settings: dict[str, Any], *, adapters: bool = False) -> Path:
    """An encoder with running statistics other than the initial ones, and with trained adapters."""
    arguments = {key: value for key, value in settings.items() if key != "_target_"}
    torch.manual_seed(0)
    encoder = vars(encoders)[settings["_target_"].rpartition(".")[2]](**arguments)
    if adapters:
        encoder.add_adapters(bottleneck=3, blocks=2)
        for layer in encoder.adapters.values():
            torch.nn.init.normal_(layer.up.weight, std=0.3)
    channels, size = settings["channels"], settings["size"]
    encoder.train()(torch.randn(8, channels, size, size))
    mean, std = [0.25, 0.5, 0.75][:channels], [0.5, 0.25, 0.125][:channels]
    save_encoder(file, encoder, settings=settings, mean=mean, std=std, metadata=METADATA)
    return file


def source_of(folder: Path, settings: dict[str, Any], *, adapters: bool = False) -> ExportSource:
    file = write_encoder(folder / "encoder.pt", settings, adapters=adapters)
    return ExportSource.read(file)


def images_like(encoder: Any, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (count, encoder.channels, encoder.size, encoder.size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def theirs(form: str, target: Path, images: Tensor) -> Tensor:
    """Representations by the program that reads an exported file or folder, without the comparison of the export."""
    if form == "onnx":
        (found,) = onnxruntime.InferenceSession(target).run(None, {"images": images.numpy()})
        return torch.from_numpy(found)
    if form == "torch_export":
        h: Tensor = torch.export.load(target).module()(images)
        return h.detach()
    encoder = load_encoder(target / "model.safetensors" if form == "huggingface" else target)
    return ours(encoder, images)


def ours(encoder: Any, images: Tensor) -> Tensor:
    with torch.no_grad():
        h: Tensor = encoder(encoder.preprocess(images))
    return h
