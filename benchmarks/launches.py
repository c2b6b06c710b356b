"""Launches, copies from the host and waits in a training step on a GPU, counted without a GPU.

    uv run python benchmarks/launches.py [--encoders resnet18] [--methods simclr byol] [--precision bf16]

`fedssl.training.train` runs on the CPU, and all decisions that depend on the device are those for a GPU. A tensor is on
the device if it came from pinned memory, or if an operation computed it from such a tensor; a tensor without inputs is
on the device unless it is random. The counts are the difference between epochs of three and of two steps, and the rest
of an epoch.

launches  Operations of aten that compute, forward and backward, without views and allocations. Operations on lists of
          tensors count one launch for as many tensors and blocks as their kernels can hold. Convolutions count their
          backward kernels, and a copy if the weights have another memory format than the images.
copies    From the host.
waits     For a number that the host reads.

The counts are lower bounds: some operations launch several kernels (sorting, factorization, batch normalization). With
``--overrides cuda_graphs=true optimizer.fused=true`` a recorded step is one launch.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common import make_parser
from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.machine import cuda_graphs, devices
from fedssl.methods.base import build_method
from fedssl.seeding import torch_generator
from fedssl.training import LocalTrainer, train

METHODS = ("simclr", "byol", "simsiam", "barlow_twins", "moco_v3", "fedx", "orchestra", "supervised")
ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "_unsafe_view")
WAIT = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero")
HOST = ("rand", "randn", "randint", "randperm", "scalar_tensor", "promote_types")  # without inputs, but on the host
HOST += ("_record_function_enter_new", "_record_function_exit")
# torch's kernels: maximum number of tensors per list, by number of lists
LISTS_OF_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
BLOCKS, BLOCK = 320, 65536  # blocks per kernel, and elements per block
REGULARIZERS = ("prox", "decorr", "alignment", "fur")


@dataclass(frozen=True)
class Requests:
    """Requests to the device."""

    launches: int
    copies: int
    waits: int

    def __sub__(self, other: "Requests") -> "Requests":
        return Requests(*(own - others for own, others in zip(astuple(self), astuple(other), strict=True)))


class Device(TorchDispatchMode):
    """Tracks the tensors on the device, and counts requests."""

    def __init__(self, resident: list[Tensor]) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.copies = self.waits = 0
        self._here: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in resident:
            self._keep(tensor)

    def requests(self) -> Requests:
        return Requests(sum(self.operations.values()), self.copies, self.waits)

    def copy(self, tensor: Tensor) -> Tensor:
        self.copies += 1
        copied = tensor.clone()
        self._keep(copied)
        return copied

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name not in HOST and (not given or any(tensor.untyped_storage()._cdata in self._here for tensor in given)):
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._keep(leaf)
            self._count(func, name, args)
        return out

    def _count(self, func: Any, name: str, args: Any) -> None:
        if name in WAIT or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self.waits += 1
        elif not func.is_view and name not in ALLOCATE:
            self.operations[name] += kernels(name, args)

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._here:
            self._here[key] = weakref.ref(storage, partial(self._freed, key))

    def _freed(self, key: int, _: Any) -> None:
        del self._here[key]


def kernels(name: str, args: Any) -> int:
    """Return the launches of an operation."""
    if name.startswith(("_foreach_", "_fused_")):
        lists = [arg for arg in args if isinstance(arg, list) and arg and isinstance(arg[0], Tensor)]
        blocks = sum(math.ceil(tensor.numel() / BLOCK) for tensor in lists[0])
        return max(math.ceil(len(lists[0]) / LISTS_OF_TENSORS[min(len(lists), 5)]), math.ceil(blocks / BLOCKS))
    if name == "convolution":
        return 1 + formats_differ(args[0], args[1])
    if name == "convolution_backward":
        to_images, to_weights, to_bias = args[-1]
        # The gradient of the images needs the weights in the images' memory format. The copy of the weights' gradient
        # also happens on a CPU.
        return to_images + to_weights + to_bias + formats_differ(args[1], args[2]) * to_images
    return 1


def formats_differ(images: Tensor, weights: Tensor) -> bool:
    """Return whether the images are channels-last and the weights are not."""
    last = torch.channels_last
    return images.is_contiguous(memory_format=last) and not weights.is_contiguous(memory_format=last)


class Client:
    """A client whose CPU is treated as a GPU. ``settings`` are overrides."""

    def __init__(self, settings: Sequence[str], *, batch: int) -> None:
        composed = compose(["dataset=cifar10", f"batch_size={batch}", *settings])
        self.batch = batch
        self.images = torch.randint(0, 256, (3 * batch, 3, composed.data.size, composed.data.size), dtype=torch.uint8)
        self.method = build_method(composed.model)
        self.method.start_round(first=True)
        self._results: list[Tensor] = []
        as_gpu = patch.multiple(devices, CPU="none", CUDA="cpu")
        with as_gpu, patch.object(cuda_graphs, "capture_on_gpu", lambda device: self._record):
            self.training = replace(LocalTrainer.build(composed.training, self.method), epochs=1)
        for group in self.training.optimizer.param_groups:
            group["foreach"] = not group["fused"]  # torch's default on a GPU

    def epoch(self, steps: int) -> Device:
        labels = torch.zeros(len(self.images), dtype=torch.int64) if self.method.uses_labels else None
        optimizer_state = list(self.training.optimizer.state.values())
        kept = (self.images, labels, self.method.state_dict(), optimizer_state, self._results)
        self._device = device = Device([leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)])
        arrival = patch.object(Tensor, "pin_memory", lambda tensor: device.copy(tensor))
        with patch.object(devices, "CPU", "none"), arrival, device:
            generator, indices = torch_generator(0, "launches"), torch.arange(steps * self.batch)
            train(
                self.method,
                TensorImages(self.images),
                indices,
                training=self.training,
                generator=generator,
                labels=labels,
            )
        return device

    def _record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Return a recorded step, which is one launch. Its values do not matter."""
        self._results.append(step())
        return lambda: self._device.operations.update(graph=1), self._results[-1]


def count(*settings: str, batch: int = 8) -> tuple[Requests, Requests, Counter[str]]:
    """Return the requests of a step, the other requests of an epoch, and the operations of a step."""
    client = Client(settings, batch=batch)
    for _ in range(cuda_graphs.WARMUP_STEPS + 1 if client.training.graphs else 1):
        client.epoch(1)  # creates all tensors that persist between steps
    two, three = client.epoch(2), client.epoch(3)
    step = three.requests() - two.requests()
    return step, two.requests() - step - step, three.operations - two.operations


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--encoders", nargs="+", default=["resnet18", "conv_small", "vit_tiny"])
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--regularizers", nargs="*", choices=REGULARIZERS, default=REGULARIZERS)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--overrides", nargs="*", default=[], help="further settings")
    parser.add_argument("--operations", action="store_true", help="also list the operations of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("                                      a step: launches copies waits   once an epoch: launches copies waits")
    cases = [(encoder, method, "none") for encoder in options.encoders for method in options.methods]
    cases += [(options.encoders[0], "simclr", regularizer) for regularizer in options.regularizers]
    for encoder, method, regularizer in cases:
        chosen = [f"encoder={encoder}", f"method={method}", f"regularizer={regularizer}", *options.overrides]
        step, epoch, operations = count(*chosen, f"precision={options.precision}", batch=options.batch)
        print(
            f"{encoder:12s} {method:13s} {regularizer:10s} {step.launches:15d} {step.copies:6d} {step.waits:5d}"
            f" {epoch.launches:24d} {epoch.copies:6d} {epoch.waits:5d}",
            flush=True,
        )
        if options.operations:
            print("  " + ", ".join(f"{name} {number}" for name, number in operations.most_common()))


if __name__ == "__main__":
    main()
