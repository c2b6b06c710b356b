"""CUDA graphs: a GPU records what a training step asks of it, and does it again for one launch.

A small step asks for hundreds of kernels, each of which takes the process longer to ask for than the GPU to do. A
recorded step works on the memory it was recorded with: weights, the optimizer's state and the learning rate stay where
they are and change in place, and what differs from step to step is copied to where the recorded one reads it.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedssl.errors import InputError, RequestRefused

WARMUP_STEPS = (
    3  # steps of a kind before one is recorded: libraries choose their kernels, the optimizer makes its state
)
MAX_GRAPHS = 16  # recorded kinds of steps, which differ in their batch size or in what is trained

TrainStep = Callable[..., Tensor]
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


@dataclass(frozen=True)
class _CapturedStep:
    """Where a recorded step reads and what does it again, and where its result is then."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    result: Tensor


class CudaGraphCache:
    """The recorded steps of one method with one optimizer.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        A fused one, see `check_fused`. Its learning rates become tensors.
    record : callable, optional
        Takes a step without arguments, does it once, and returns what does it again and the tensor that has its result
        after each time. None: a CUDA graph.
    """

    def __init__(self, optimizer: Optimizer, record: Capture | None = None) -> None:
        self._optimizer, self._record = optimizer, record or capture_on_gpu()
        self._recorded: OrderedDict[Hashable, _CapturedStep] = OrderedDict()
        self._done: Counter[Hashable] = Counter()
        self._trained: list[bool] = []
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
            if "capturable" in group:
                group["capturable"] = True  # else torch refuses to record the step

    def reset_optimizer(self, lrs: Sequence[float]) -> None:
        """Let the optimizer forget what it was used for before, and set the learning rates of its groups."""
        groups = self._optimizer.param_groups
        trained = [parameter.requires_grad for group in groups for parameter in group["params"]]
        if trained == self._trained:
            # Zeros are what SGD without dampening, Adam and AdamW begin with.
            for state in self._optimizer.state.values():
                torch._foreach_zero_([value for value in state.values() if isinstance(value, Tensor)])
        else:  # a fused step wants the state of all that is trained, or of nothing
            self._optimizer.state.clear()
            self._recorded.clear()
            self._done.clear()
            self._trained = trained
        for group, lr in zip(groups, lrs, strict=True):
            group["lr"].fill_(lr)

    def run(self, step: TrainStep, inputs: Sequence[Tensor]) -> Tensor:
        """Do a step; the result is good until the next one.

        Parameters
        ----------
        step : callable
            What it does must depend on the inputs' shapes and dtypes only, up to the next `reset_optimizer` that trains other
            weights.
        inputs : sequence of Tensor
            Its arguments.
        """
        kind = tuple((x.shape, x.dtype) for x in inputs)
        recorded = self._recorded.get(kind)
        if recorded is None:
            self._done[kind] += 1
            if self._done[kind] <= WARMUP_STEPS:
                return step(*inputs)
            own = [x.clone() for x in inputs]
            recorded = _CapturedStep(own, *self._record(lambda: step(*own)))
            self._recorded[kind] = recorded
            if len(self._recorded) > MAX_GRAPHS:
                self._recorded.popitem(last=False)
            return recorded.result
        self._recorded.move_to_end(kind)
        for own_input, given in zip(recorded.inputs, inputs, strict=True):
            own_input.copy_(given)
        recorded.replay()
        return recorded.result


def check_fused(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step cannot be recorded, or does not begin with zeros; raises `InputError`."""
    for group in optimizer.param_groups:
        if not group.get("fused"):
            raise InputError("cuda_graphs=true needs optimizer.fused=true, because only such a step can be recorded")
        if group.get("dampening"):
            raise InputError(
                f"optimizer.dampening={group['dampening']} makes the first step unlike the others, which "
                "cuda_graphs=true does not allow; set optimizer.dampening=0 or cuda_graphs=false"
            )


def capture_on_gpu() -> Capture:
    """What records steps as CUDA graphs, which share their memory because one runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the process may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RequestRefused(f"a training step cannot be recorded ({error}); set cuda_graphs=false") from error
        graph.replay()  # so far nothing was done
        return graph.replay, result

    return record
