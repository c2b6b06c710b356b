"""FLOPs and peak memory of one training step, measured while `fedssl.training.train` trains a copy of the method.

FLOPs are those of torch's `FlopCounterMode`: 2 per multiplication of a matrix product, a convolution or attention,
forward and backward. Normalization, softmax, activations and the optimizer count 0. The backward pass of attention
computes the scores again, as memory-efficient kernels do.

Peak memory is that of tensors: weights and buffers including inactive ones, gradients, the optimizer's state,
activations saved for the backward pass, views, and what a regularizer or a method stores. On a GPU it is measured by
torch's allocator. On a CPU, and for a GPU with too little memory for the step, the outputs of every operation are
tracked until their memory is freed, without temporaries inside kernels. Neither includes the data set, memory outside
of torch's allocator (cuBLAS, oneDNN), messages, Python, and the allocator's unused memory.
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
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count

from fedssl.datasets.base import ImageData
from fedssl.datasets.images import TensorImages
from fedssl.machine.devices import MPS, is_gpu
from fedssl.machine.out_of_memory import deepcopy_to_cpu, retry_in_chunks
from fedssl.methods.base import SSLMethod
from fedssl.schedule.phases import Phase
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import torch_generator
from fedssl.training import LocalTrainer, number_of_batches, train

WARMUP_IMAGES = 2  # images of the step before the one that is measured


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of one training step."""

    num_images: int
    flops: float  # forward and backward; the expected number with depth dropout
    peak_memory: int  # in bytes; with depth dropout the peak of a step that skips no stage
    trained_parameters: int
    parameters_in_memory: int  # all active ones: trained, frozen, or of a target network

    @property
    def flops_per_image(self) -> float:
        """FLOPs divided by the number of images."""
        return self.flops / self.num_images


def step_cost(
    method: SSLMethod,
    *,
    images: Tensor,
    training: LocalTrainer,
    labels: Tensor | None = None,
) -> StepCost:
    """Measure a step of ``method`` with its active stages.

    The method, the optimizer, the regularizer and all random generators remain unchanged. ``images`` are
    ``(batch, channels, height, width)``, uint8, on the method's device; their content has no effect. Epochs and batch
    size of ``training`` are ignored. ``labels`` as in `fedssl.training.train`. If a GPU has too little memory, a step
    on the CPU is measured.
    """

    def measure(used: torch.device, _: int) -> StepCost:
        if used == images.device:
            return _step_cost(method, images=images, training=training, labels=labels)
        parts = method, training.optimizer, training.regularizer
        tensors = [*method.all_tensors(), *tree_leaves(training.optimizer.state_dict())]
        on_cpu, optimizer, regularizer = deepcopy_to_cpu(parts, [leaf for leaf in tensors if isinstance(leaf, Tensor)])
        return _step_cost(
            on_cpu,
            images=images.cpu(),
            training=replace(training, optimizer=optimizer, regularizer=regularizer),
            labels=None if labels is None else labels.cpu(),
        )

    return retry_in_chunks(measure, device=images.device, what="a training step is measured")


def _step_cost(method: SSLMethod, *, images: Tensor, training: LocalTrainer, labels: Tensor | None) -> StepCost:
    device, source = images.device, TensorImages(images)

    def measure() -> tuple[int, int]:
        accelerators = [device] if is_gpu(device) else []
        fork = torch.random.fork_rng(devices=accelerators, device_type=device.type if accelerators else "cuda")
        with fork, memory_of(device) as memory:
            copied, optimizer, regularizer = copy.deepcopy((method, training.optimizer, training.regularizer))
            one_epoch = replace(training, optimizer=optimizer, regularizer=regularizer, epochs=1, graphs=None)

            def step(num_images: int) -> None:
                train(
                    copied,
                    source,
                    torch.arange(num_images),
                    training=replace(one_epoch, batch_size=num_images),
                    generator=torch_generator(0, "cost"),
                    labels=labels,
                )

            copied.targets(source, torch.arange(len(images)))  # computed once per image, so no part of a step
            step(min(WARMUP_IMAGES, len(images)))  # creates what persists between steps: the optimizer's state
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
    """Return torch's counter with a formula for every kernel of attention, and for groups of convolutions."""
    aten: Any = torch.ops.aten
    formulas = {
        # Older versions of torch count 0 for these two.
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        # Used in eval mode without gradients if the number of heads is even.
        aten._native_multi_head_attention: _attention_layer,
        # torch 2.15 counts the gradient of weights once per group.
        aten.convolution_backward: _convolution_backward,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


class TensorMemory(TorchDispatchMode):
    """Peak memory of all tensors that are created while the mode is active.

    Tensors that share memory count once. Temporaries inside kernels and earlier tensors do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._now = self._peak = 0

    def reset_peak(self) -> None:
        """Set the peak to the current memory."""
        self._peak = self._now

    def peak(self) -> int:
        """Return the peak in bytes since the last reset."""
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {key for key, _ in _storages((args, kwargs))}
        for key, storage in _storages(out):
            if key not in self._alive and key not in inputs:
                self._alive[key] = weakref.ref(storage, partial(self._freed, key, storage.nbytes()))
                self._now += storage.nbytes()
        self._peak = max(self._peak, self._now)
        return out

    def _freed(self, key: int, size: int, _: Any) -> None:
        del self._alive[key]
        self._now -= size


class AllocatorMemory:
    """Peak of torch's allocator on a GPU, relative to the memory at construction; interface as in `TensorMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, torch.accelerator.memory_allocated(device)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated(self._device) - self._before


@contextmanager
def memory_of(device: torch.device) -> Iterator[TensorMemory | AllocatorMemory]:
    """Track the memory of tensors on the device inside the block."""
    if is_gpu(device) and device.type != MPS:  # whose allocator has no peak
        yield AllocatorMemory(device)
    else:
        with TensorMemory() as memory:
            yield memory


def _storages(tree: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            yield storage._cdata, storage


def _expected(method: SSLMethod, measure: Callable[[], tuple[int, int]]) -> tuple[float, int]:
    """Return the expected FLOPs over the draws of depth dropout, and the peak memory without it.

    Stages are skipped independently, so the FLOPs of no and of all skipped stages determine the expectation.
    """
    active = method.encoder.active_stages
    dropout = active.depth_dropout
    with method.encoder.run_stages(replace(active, depth_dropout=0.0)):
        flops, peak = measure()
    if not dropout:
        return flops, peak
    with method.encoder.run_stages(replace(active, depth_dropout=1.0)):
        return (1 - dropout) * flops + dropout * measure()[0], peak


def _convolution_backward(grad: Any, x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Return as many FLOPs as the forward pass has, for each of the gradients of input and weight."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, outputs = args
    return int(conv_flop_count(x, weight, grad, transposed) * sum(outputs[:2]))


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _attention_layer(query: Any, key: Any, value: Any, width: int, heads: int, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of four linear layers and attention on tokens ``(batch, length, width)``."""
    batch, length, _ = query
    head = (batch, heads, length, width // heads)
    return int(2 * batch * length * 4 * width**2 + sdpa_flop_count(head, head, head))


class TrainingCostMeter:
    """Measures the cost of a training step once per phase, on the server's method, which remains unchanged.

    ``training`` is that of the clients, ``trainings_per_round`` of a client. ``parts`` are the indices of each client's
    images in ``image_data``, and ``device`` is that of the method.
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
        step = self.step(phase)
        num_images = float(np.mean([self._num_images[client] for client in clients]))
        num_images *= self._training.epochs * self._trainings_per_round
        return {
            "flops": step.flops_per_image * num_images,
            "flops_per_image": step.flops_per_image,
            "peak_memory": step.peak_memory,
            "trained_parameters": step.trained_parameters,
            "resident_parameters": step.parameters_in_memory,
        }

    def client_flops(self, phase: Phase, client: int) -> float:
        """Return the FLOPs of a round of one client."""
        num_images = self._num_images[client] * self._training.epochs * self._trainings_per_round
        return self.step(phase).flops_per_image * num_images

    def step(self, phase: Phase) -> StepCost:
        """Return the cost of a step, which the first call measures."""
        if phase.number not in self._steps:
            with set_active_stages(
                self._method, depth=phase.depth, frozen=phase.frozen, depth_dropout=phase.depth_dropout
            ):
                self._steps[phase.number] = step_cost(
                    self._method, images=self._images, training=self._training, labels=self._labels
                )
        return self._steps[phase.number]
