"""Methods with small heads, and a training with a regularizer."""

from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from fedssl.datasets.images import TensorImages
from fedssl.encoders import conv_small
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer
from fedssl.seeding import torch_generator
from fedssl.training import train
from tests.local_training import local_training

CONF = Path(__file__).parents[3] / "conf"


def make(name: str) -> SSLMethod:
    node = OmegaConf.load(CONF / "method" / f"{name}.yaml")
    settings = OmegaConf.create({"method": node, "dataset": {"num_classes": 3}})
    for head in {"projector", "predictor"} & set(settings.method):
        settings.method[head].hidden_dim = 16
    if "projector" in settings.method:
        settings.method.projector.out_dim = 8
    if name == "distillation":
        arguments = {"channels": 1, "size": 8, "width": 2}  # representations of length 8
        settings.method.teacher_encoder = {"encoder": "conv_small", "arguments": arguments, "mean": [0.5], "std": [0.5]}
    torch.manual_seed(0)
    return instantiate(settings.method, encoder=conv_small(channels=1, size=8, width=4))


def fit(method: SSLMethod, regularizer: Regularizer, *, precision: str = "fp32", epochs: int = 1) -> float:
    generator = torch_generator(0, "train")
    images = torch.randint(256, (12, 1, 8, 8), generator=generator, dtype=torch.uint8)
    if regularizer.uses_initial_encoder:
        method.keep_initial_encoder()
    return train(
        method,
        TensorImages(images),
        torch.arange(12),
        training=local_training(
            torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.1),
            augment=lambda batch, draw: (batch / 255 + torch.rand(batch.shape, generator=draw), batch / 255),
            regularizer=regularizer,
            epochs=epochs,
            batch_size=6,
            precision=precision,
        ),
        generator=generator,
        labels=torch.arange(12) % 3,
    ).loss
