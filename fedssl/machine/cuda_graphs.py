"""CUDA graphs: capture a training step on a GPU and replay it with one launch.

A small step consists of hundreds of kernels, each of which takes longer to launch than to run. A captured step uses the
memory it was captured with: weights, optimizer state and learning rate keep their addresses and change in place, and
inputs are copied into static tensors.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedssl.errors import InputError, RequestRefused
from fedssl.logs import log
from fedssl.machine.devices import CUDA, is_gpu
from fedssl.machine.out_of_memory import free_cached_memory
from fedssl.views import Views

WARMUP_STEPS = 3  # eager steps before capture: libraries choose kernels, the optimizer creates its state
MAX_GRAPHS = 32  # captured kinds of steps, which differ in batch size

# Modules whose steps are tested to give the same numbers when captured.
BUILT_IN = ("fedssl.", "strategies.", "torch.optim.")
LIBRARIES = ("torch.nn.", "torchvision.", "timm.")  # whose networks depend on tensors alone

TrainStep = Callable[[Views], Tensor]
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
_Kind = tuple[Hashable, ...]  # constants, then shape and dtype of every input


class Capturable(Protocol):
    """Part of a training step. ``cuda_graph_safe`` is whether every step of a batch size runs the same operations."""

    @property
    def cuda_graph_safe(self) -> bool: ...


@dataclass(frozen=True)
class _CapturedStep:
    inputs: Views
    replay: Callable[[], None]
    result: Tensor


class CudaGraphCache:
    """The captured steps of one method with one optimizer.

    The optimizer must be fused, see `captures_steps`; its learning rates become tensors. ``capture`` runs a step
    without arguments once, and returns a function that replays it and its static result; the default is a CUDA graph.
    If a capture fails, ``required`` refuses the training. Otherwise this and all later steps run without graphs.
    """

    def __init__(self, optimizer: Optimizer, capture: Capture | None = None, *, required: bool = True) -> None:
        device = optimizer.param_groups[0]["params"][0].device
        self._optimizer, self._capture = optimizer, capture or capture_on_gpu(device)
        self._captured: dict[_Kind, _CapturedStep] = {}
        self._done: Counter[_Kind] = Counter()  # steps of every kind
        self._trained: list[bool] = []
        self._required, self._has_failed = required, False
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
            if "capturable" in group:
                group["capturable"] = True  # required by torch for capture

    def reset_optimizer(self, lrs: Sequence[float]) -> None:
        """Reset the optimizer's state, and set the learning rates of its groups."""
        groups = self._optimizer.param_groups
        trained = [parameter.requires_grad for group in groups for parameter in group["params"]]
        if trained == self._trained:
            # SGD without dampening, Adam and AdamW start with zeros.
            for state in self._optimizer.state.values():
                torch._foreach_zero_([value for value in state.values() if isinstance(value, Tensor)])
        else:  # a fused step needs state for all trained parameters, or for none
            self._optimizer.state.clear()
            self._captured.clear()
            self._done.clear()
            self._trained = trained
        for group, lr in zip(groups, lrs, strict=True):
            group["lr"].fill_(lr)

    def run(self, step: TrainStep, inputs: Views, *, constants: Hashable = ()) -> Tensor:
        """Run a step; the result is valid until the next step.

        The operations of the step may depend on ``constants``, and the shapes and dtypes of the inputs only, until a
        `reset_optimizer` with other trained parameters.
        """
        tensors = inputs.tensors()
        kind = (constants, *((x.shape, x.dtype) for x in tensors))
        captured = self._captured.get(kind)
        self._done[kind] += 1
        if captured is None:
            if self._has_failed or self._done[kind] <= WARMUP_STEPS or not self._make_room(kind):
                return step(inputs)
            return self._first_of(kind, step, inputs)
        for static_input, x in zip(captured.inputs.tensors(), tensors, strict=True):
            static_input.copy_(x)
        captured.replay()
        return captured.result

    def _first_of(self, kind: _Kind, step: TrainStep, inputs: Views) -> Tensor:
        """Capture a step of a kind, run it, and return its result."""
        try:
            static = inputs.with_tensors([x.clone() for x in inputs.tensors()])
            captured = self._captured[kind] = _CapturedStep(static, *self._capture(lambda: step(static)))
            return captured.result
        except RuntimeError as error:
            if self._required and isinstance(error, torch.OutOfMemoryError):
                raise
            if self._required:
                raise RequestRefused(f"a training step cannot be captured ({error}); set cuda_graphs=false") from error
            reason = str(error).strip().partition("\n")[0]
        # Nothing has been computed. Graphs keep memory that other steps cannot use, and gradients may be in it.
        self._has_failed, self._captured = True, {}
        self._optimizer.zero_grad(set_to_none=True)
        free_cached_memory()
        log.warning("training goes on without CUDA graphs, because a step cannot be captured: %s", reason)
        return step(inputs)

    def _make_room(self, kind: _Kind) -> bool:
        """Return whether a kind of step can be captured, if need be instead of one that is half as frequent.

        Constants change between rounds and seldom return, so that steps with others are replaced first.
        """
        if len(self._captured) < MAX_GRAPHS:
            return True
        rarest = min(self._captured, key=lambda other: (other[0] == kind[0], self._done[other]))
        if rarest[0] == kind[0] and self._done[kind] <= 2 * self._done[rarest]:
            return False  # else kinds of equal frequency would replace each other
        del self._captured[rarest]
        return True


def captures_steps(
    wanted: bool | None, optimizer: Mapping[str, Any], parts: Sequence[Capturable], device: torch.device
) -> bool:
    """Return whether the training steps on a device are captured.

    Parameters
    ----------
    wanted : bool or None
        None captures them on devices with CUDA or ROCm if they can be captured, and the parts and all their modules,
        such as the encoder, are built in: a plugin may depend on a number of Python that a captured step would not
        update.
    optimizer : mapping
        Settings of the optimizer, which must support ``fused`` for capture.
    parts : sequence
        Method and regularizer.

    Raises
    ------
    InputError
        If ``wanted`` is true and the steps cannot be captured.
    """
    reason = _reason_against(optimizer, parts)
    if wanted and reason:
        raise InputError(reason)
    if wanted is None:
        built_in = optimizer["_target_"].startswith(BUILT_IN) and all(map(_is_built_in, parts))
        wanted = device.type == CUDA and built_in and reason is None
    return wanted and is_gpu(device)


def _is_built_in(part: Capturable) -> bool:
    networks = part.modules() if isinstance(part, nn.Module) else ()
    return type(part).__module__.startswith(BUILT_IN) and all(
        type(network).__module__.startswith((*BUILT_IN, *LIBRARIES)) for network in networks
    )


def _reason_against(optimizer: Mapping[str, Any], parts: Sequence[Capturable]) -> str | None:
    if optimizer.get("fused", False) is False:
        return "cuda_graphs=true needs optimizer.fused=true or null, because only fused steps can be captured"
    if optimizer.get("dampening"):
        return (
            f"optimizer.dampening={optimizer['dampening']} makes the first step differ from the others, which "
            "cuda_graphs=true does not support; set optimizer.dampening=0 or cuda_graphs=false"
        )
    for part in parts:
        if not part.cuda_graph_safe:
            name = type(part).__name__
            return f"cuda_graphs=true but the steps of {name} differ with these settings; set cuda_graphs=false"
    return None


def capture_on_gpu(device: torch.device) -> Capture:
    """Return a function that captures steps on a device as CUDA graphs; they share memory: they run one at a time.

    They have a stream of their own. PyTorch's default one is that of the first device on which this process captured:
    a graph of another device would be empty, and its replay would do nothing. And some versions of PyTorch (2.12 to
    2.14) free cuBLAS's memory for a stream, which all graphs captured on it use, when one of them is deleted.

    A pool of memory must not be used again after its last graph is deleted (PyTorch's allocator refuses it while
    tensors of the pool exist), so the next graph then has a new one.
    """
    graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
    pool, stream = None, torch.cuda.Stream(device)

    def capture(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        nonlocal pool
        if not graphs:
            pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the GPU at the same time.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = step()
        graphs.add(graph)
        graph.replay()  # capturing does not run the step
        return graph.replay, result

    return capture
