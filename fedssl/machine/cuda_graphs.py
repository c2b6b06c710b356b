"""CUDA graphs: capture a training step on a GPU and replay it with one launch.

A small step consists of hundreds of kernels, each of which takes longer to launch than to run. A captured step uses the
memory it was captured with: weights, optimizer state and learning rate keep their addresses and change in place, and
inputs are copied into static tensors.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedssl.errors import InputError, RequestRefused
from fedssl.views import Views

WARMUP_STEPS = 3  # eager steps before capture: libraries choose kernels, the optimizer creates its state
MAX_GRAPHS = 16  # captured kinds of steps, which differ in batch size

TrainStep = Callable[[Views], Tensor]
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


@dataclass(frozen=True)
class _CapturedStep:
    inputs: Views
    replay: Callable[[], None]
    result: Tensor


class CudaGraphCache:
    """The captured steps of one method with one optimizer.

    The optimizer must be fused, see `check_fused`; its learning rates become tensors. ``capture`` runs a step without
    arguments once, and returns a function that replays it and its static result; the default is a CUDA graph.
    """

    def __init__(self, optimizer: Optimizer, capture: Capture | None = None) -> None:
        self._optimizer, self._capture = optimizer, capture or capture_on_gpu()
        self._captured: OrderedDict[Hashable, _CapturedStep] = OrderedDict()
        self._done: Counter[Hashable] = Counter()
        self._trained: list[bool] = []
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
        if captured is None:
            self._done[kind] += 1
            if self._done[kind] <= WARMUP_STEPS:
                return step(inputs)
            static = inputs.with_tensors([x.clone() for x in tensors])
            captured = _CapturedStep(static, *self._capture(lambda: step(static)))
            self._captured[kind] = captured
            if len(self._captured) > MAX_GRAPHS:
                self._captured.popitem(last=False)
            return captured.result
        self._captured.move_to_end(kind)
        for static_input, x in zip(captured.inputs.tensors(), tensors, strict=True):
            static_input.copy_(x)
        captured.replay()
        return captured.result


def check_fused(optimizer: Optimizer) -> None:
    """Reject, by an `InputError`, an optimizer whose step cannot be captured or whose initial state is not zero."""
    for group in optimizer.param_groups:
        if not group.get("fused"):
            raise InputError("cuda_graphs=true needs optimizer.fused=true, because only fused steps can be captured")
        if group.get("dampening"):
            raise InputError(
                f"optimizer.dampening={group['dampening']} makes the first step differ from the others, which "
                "cuda_graphs=true does not support; set optimizer.dampening=0 or cuda_graphs=false"
            )


def capture_on_gpu() -> Capture:
    """Return a function that captures steps as CUDA graphs; graphs share memory because they run one at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the process may use the GPU at the same time.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RequestRefused(f"a training step cannot be captured ({error}); set cuda_graphs=false") from error
        graph.replay()  # capturing does not run the step
        return graph.replay, result

    return capture
