"""Features of labeled images by a frozen encoder.

The encoder is in eval mode, without augmentation. Features are the representations h, not the projections z. L-DAWA's
code keeps batch normalization in training mode while it probes, which `fedssl.evaluation.sgd_linear_probe` can do, and
EasyFL monitors the projection, which is not implemented.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.datasets.images import ImageSource
from fedssl.datasets.raster import unit_values
from fedssl.errors import InputError
from fedssl.machine.devices import is_gpu, to_device
from fedssl.machine.out_of_memory import module_on_cpu, retry_in_chunks

MAX_PIXELS = 3072  # per image: those of an RGB image of 32 x 32
BLOCK_BYTES = 2**27  # of representations that are copied from a GPU at once, because each copy synchronizes
_CHUNK = 256  # images converted to floats at a time


@dataclass(frozen=True)
class Features:
    """Features of labeled training and test images, by an encoder or raw pixels."""

    train: Tensor  # float32, ``(n_train, dim)``
    train_labels: Tensor  # int64, ``(n_train,)``, values in [0, num_classes)
    test: Tensor  # float32, ``(n_test, dim)``
    test_labels: Tensor  # int64, ``(n_test,)``
    num_classes: int

    def __post_init__(self) -> None:
        if not (self.train.isfinite().all() and self.test.isfinite().all()):
            raise InputError(
                "the encoder gives features that are NaN or infinite, so its training has diverged; lower optimizer.lr"
            )


def extract(
    encoder: nn.Module,
    images: ImageSource,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str,
    batch_size: int = 256,
) -> Tensor:
    """Compute the representations of images by a frozen encoder: float32, ``(n, feature_dim)``, on the CPU.

    The encoder maps ``(batch, channels, height, width)`` to ``(batch, feature_dim)``. It is moved to ``device``; the
    training mode of its modules is restored. ``mean`` and
    ``std`` are per channel, of pixels in [0, 1]. If the device has too little memory, batches are smaller, or a copy of
    the encoder computes on the CPU.
    """
    device = torch.device(device)

    def compute(used: torch.device, chunk: int) -> Tensor:
        network = encoder.to(device) if used == device else module_on_cpu(encoder)
        source = images.to(used) if is_gpu(images.device) else images
        center, scale = to_device(torch.tensor([list(mean), list(std)]), used).view(2, -1, 1, 1)
        blocks: list[Tensor] = []  # complete blocks from a GPU
        computed: list[Tensor] = []
        with eval_mode(network):
            for batch in source.chunks(chunk):
                pixels = batch if is_gpu(batch.device) else to_device(batch, used)
                computed.append(network((unit_values(pixels) - center) / scale).float())
                if is_gpu(used) and len(computed) * computed[0].nbytes >= BLOCK_BYTES * chunk // batch_size:
                    blocks.append(torch.cat(computed).cpu())
                    computed.clear()
        if computed:
            blocks.append(torch.cat(computed).cpu())
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    return retry_in_chunks(compute, device=device, chunk=batch_size, what="representations are computed")


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Set eval mode without gradients inside the block, and restore the mode of each module after it.

    Gradients are disabled by ``no_grad``: an inference tensor that a network keeps could not be trained or copied.
    """
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def pixels(images: ImageSource) -> Tensor:
    """Return `pixel_values` of images as features, float32 ``(n, dim)``: the baseline of representations."""
    return torch.cat([pixel_values(chunk) for chunk in images.chunks(_CHUNK)])


def pixel_values(images: Tensor, *, max_values: int = MAX_PIXELS) -> Tensor:
    """Return raw pixels in [0, 1] of images ``(n, channels, height, width)``, float32 ``(n, dim)``.

    Images with more than ``max_values`` values are averaged over the smallest squares that give no more than that.
    """
    _, channels, height, width = images.shape
    side = 1
    while channels * -(-height // side) * -(-width // side) > max_values:
        side += 1
    return F.avg_pool2d(unit_values(images), side, ceil_mode=True).flatten(1)  # squares at the border may be cut


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """Return the share of predictions ``(n,)`` that equal the labels ``(n,)``, in [0, 1]."""
    return (predictions.cpu() == labels.cpu()).double().mean().item()
