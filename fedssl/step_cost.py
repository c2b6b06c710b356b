"""What a client's training step costs, measured on the step itself: floating point operations and memory.

The step is that of `fedssl.training.train`, augmentation and optimiser included, on copies of all that it changes.

FLOPs are those of torch's `FlopCounterMode`: two for every multiplication of a matrix product, a convolution or an
attention, forward and backward; all else (normalisation, softmax, activations, the optimiser) counts nothing. The
backward pass of attention counts the scores anew, as memory-saving kernels compute them.

Memory is that of tensors at the worst moment: weights and buffers, those out of use in the stage included, gradients,
the optimiser's state, activations that wait for the backward pass, views, and what a regulariser or a method keeps of
its own. On a GPU it is what torch's allocator says. On a CPU every operation's outputs are followed until their memory
is freed, so what a kernel needs for itself while it runs is not in it. In neither is the data set, what a library
holds outside torch's allocator (cuBLAS, oneDNN), the message that brought the layers, Python, and what an allocator
keeps beyond what is in use.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fedssl.datasets.base import ImageData
from fedssl.methods.base import SSLMethod
from fedssl.schedule.phases import Phase
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import torch_generator
from fedssl.training import LocalTrainer, number_of_batches, train

WARMUP_IMAGES = 2  # images of the step before the one that is measured


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of one training step.

    Attributes
    ----------
    num_images : int
        Of the step.
    flops : float
        Forward and backward; with depth dropout the expected number.
    peak_memory : int
        Bytes at the worst moment; with depth dropout where no stage is left out.
    trained_parameters, parameters_in_memory : int
        How many numbers are trained, and how many are in use: trained, frozen, or of a target network.
    """

    num_images: int
    flops: float
    peak_memory: int
    trained_parameters: int
    parameters_in_memory: int

    @property
    def flops_per_image(self) -> float:
        """FLOPs of an epoch, divided by its images."""
        return self.flops / self.num_images


def step_cost(
    method: SSLMethod,
    *,
    images: Tensor,
    training: LocalTrainer,
    labels: Tensor | None = None,
) -> StepCost:
    """Measure a step of ``method`` in the stage it is in.

    Nothing changes by it: not the method, the optimiser, the regulariser, nor any random generator.

    Parameters
    ----------
    images : Tensor
        The images of the step, at least two, ``(batch, channels, height, width)``, uint8, on the method's device.
        What is on them does not matter.
    training : LocalTrainer
        How the method is trained; epochs and batch size do not matter.
    labels : Tensor or None
        As in `fedssl.training.train`.
    """
    device = images.device

    def measure() -> tuple[int, int]:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), memory_of(device) as memory:
            own, optimizer, regularizer = copy.deepcopy((method, training.optimizer, training.regularizer))
            own_training = replace(training, optimizer=optimizer, regularizer=regularizer, epochs=1, graphs=None)

            def step(num_images: int) -> None:
                train(
                    own,
                    images,
                    torch.arange(num_images),
                    training=replace(own_training, batch_size=num_images),
                    generator=torch_generator(0, "cost"),
                    labels=labels,
                )

            step(WARMUP_IMAGES)  # after it there is all that stays from step to step, such as the optimiser's state
            memory.reset_peak()
            flops = count_flops()
            with flops:
                step(len(images))
            return flops.get_total_flops(), memory.peak()

    flops, peak = _expected(method, measure)
    return StepCost(
        num_images=len(images),
        flops=flops,
        peak_memory=peak,
        trained_parameters=sum(p.numel() for p in method.parameters() if p.requires_grad),
        parameters_in_memory=sum(
            p.numel() for name, p in method.named_parameters() if name not in method.inactive_names
        ),
    )


def count_flops() -> FlopCounterMode:
    """Torch's counter, with a formula for every kernel of attention."""
    aten: Any = torch.ops.aten
    formulas = {
        # Older versions of torch count nothing for these two.
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        # What torch takes in eval mode without gradients if the number of heads is even.
        aten._native_multi_head_attention: _attention_layer,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


class TensorMemory(TorchDispatchMode):
    """Bytes of all tensors that come into being while it is entered, as long as they live.

    Tensors that share memory count once. Temporaries inside a kernel do not count, nor do tensors from before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._now = self._peak = 0

    def reset_peak(self) -> None:
        """Forget the worst moment so far."""
        self._peak = self._now

    def peak(self) -> int:
        """Bytes at the worst moment."""
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {key for key, _ in _storages((args, kwargs))}
        for key, storage in _storages(out):
            if key not in self._alive and key not in given:
                self._alive[key] = weakref.ref(storage, partial(self._freed, key, storage.nbytes()))
                self._now += storage.nbytes()
        self._peak = max(self._peak, self._now)
        return out

    def _freed(self, key: int, size: int, _: Any) -> None:
        del self._alive[key]
        self._now -= size


class CudaMemory:
    """What torch's allocator has given out on a GPU since the object was made."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, torch.cuda.memory_allocated(device)

    def reset_peak(self) -> None:
        """Forget the worst moment so far."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Bytes at the worst moment."""
        return torch.cuda.max_memory_allocated(self._device) - self._before


@contextmanager
def memory_of(device: torch.device) -> Iterator[TensorMemory | CudaMemory]:
    """Follow what tensors take on the device from here on."""
    if device.type == "cuda":
        yield CudaMemory(device)
    else:
        with TensorMemory() as memory:
            yield memory


def _storages(tree: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """The memory of all tensors in nested containers, and its identity."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            yield storage._cdata, storage


def _expected(method: SSLMethod, measure: Callable[[], tuple[int, int]]) -> tuple[float, int]:
    """Mean FLOPs over the draws of depth dropout, and the peak memory without it.

    A frozen stage costs the same whichever others are left out, so that what all and what none of them cost suffices.
    """
    span, dropout = method.encoder.active_stages, method.encoder.active_stages.depth_dropout
    try:
        span.depth_dropout = 0.0
        flops, peak = measure()
        if not dropout:
            return flops, peak
        span.depth_dropout = 1.0
        return (1 - dropout) * flops + dropout * measure()[0], peak
    finally:
        span.depth_dropout = dropout


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _attention_layer(query: Any, key: Any, value: Any, width: int, heads: int, *args: Any, **kwargs: Any) -> int:
    """Four linear layers of ``width``, and the attention of all heads, on tokens ``(batch, length, width)``."""
    batch, length, _ = query
    head = (batch, heads, length, width // heads)
    return int(2 * batch * length * 4 * width**2 + sdpa_flop_count(head, head, head))


class TrainingCostMeter:
    """Measures the cost of a training step once per phase, on the server's method, which is unchanged.

    Parameters
    ----------
    method : SSLMethod
    training : LocalTrainer
        Of the clients.
    image_data : ImageData
        Of the federation.
    parts : sequence of ndarray
        The images of each client.
    device : torch.device
        Where the method is.
    trainings_per_round : int
        Number of trainings of a client in a round.
    """

    def __init__(
        self,
        method: SSLMethod,
        training: LocalTrainer,
        *,
        image_data: ImageData,
        parts: Sequence[np.ndarray],
        device: torch.device,
        trainings_per_round: int = 1,
    ) -> None:
        self._method, self._training, self._trainings_per_round = method, training, trainings_per_round
        self._num_images = [len(part) for part in parts]
        # The largest batch of any client: batches of an epoch differ by one image at most.
        min_batch_size = method.min_batch_size
        batch = max(
            -(-count // number_of_batches(count, training.batch_size, min_batch_size=min_batch_size))
            for count in self._num_images
        )
        self._images = image_data.images[:batch].to(device)
        self._labels = (
            image_data.labels[:batch].to(device) if method.uses_labels and image_data.labels is not None else None
        )
        self._steps: dict[int, StepCost] = {}

    def __call__(self, phase: Phase, clients: Sequence[int]) -> dict[str, float]:
        """Return the FLOPs of a client's round, as mean over ``clients``, and the cost of a step."""
        if phase.number not in self._steps:
            with set_active_stages(
                self._method, depth=phase.depth, frozen=phase.frozen, depth_dropout=phase.depth_dropout
            ):
                self._steps[phase.number] = step_cost(
                    self._method, images=self._images, training=self._training, labels=self._labels
                )
        step = self._steps[phase.number]
        num_images = float(np.mean([self._num_images[client] for client in clients]))
        num_images *= self._training.epochs * self._trainings_per_round
        return {
            "flops": step.flops_per_image * num_images,
            "flops_per_image": step.flops_per_image,
            "peak_memory": step.peak_memory,
            "trained_parameters": step.trained_parameters,
            "resident_parameters": step.parameters_in_memory,
        }
