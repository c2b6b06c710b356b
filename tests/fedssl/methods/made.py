"""Small methods on random views."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedssl.encoders import conv_small
from fedssl.methods.base import SSLMethod
from fedssl.methods.heads import MLP
from fedssl.views import LOCAL, View, Views
from tests.federation import Federation

HEAD = partial(MLP, hidden_dim=16, out_dim=8)


def encoder():
    torch.manual_seed(0)
    return conv_small(channels=1, size=8, width=4)


def views(batch: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(batch, 1, 8, 8, generator=generator), torch.rand(batch, 1, 8, 8, generator=generator)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def multi_crop(batch: int = 6, *, num_local: int = 3, seed: int = 0) -> Views:
    """Two global views of 8 pixels, and local ones of 4."""
    sizes = [8, 8, *[4] * num_local]
    images = [draw(batch, 1, size, size, seed=seed + number).float() for number, size in enumerate(sizes)]
    return Views(tuple(View(image, "global" if image.shape[2] == 8 else LOCAL) for image in images))


def step(method: SSLMethod, batch: Views | None = None, *, lr: float = 0.5) -> None:
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=lr)
    method.loss(batch or method.inputs(Views.of(*views()))).backward()
    optimizer.step()
    method.on_step_end()


def mean_by_images(federation: Federation, name: str) -> np.ndarray:
    """Return the mean of what the clients of the only round sent, by their numbers of images, which must differ."""
    images = [update["metrics"]["num-examples"] for update in federation.updates]
    assert len(set(images)) == len(images) > 1
    return np.average([update["arrays"][name].numpy() for update in federation.updates], axis=0, weights=images)
