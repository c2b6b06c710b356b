"""A stand-in for CUDA graphs: what a step asks for, operation by operation, done again on the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero")


class Recorded(TorchDispatchMode):
    """Keeps every operation with the tensors and numbers it was called with, as a CUDA graph does.

    Numbers that Python worked out are those of the recorded step for ever. A number that Python reads off a tensor is
    refused, as a GPU refuses to be waited for meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in WAITS or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
            raise RuntimeError(f"{name} waits for the device")
        out = func(*args, **kwargs)
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not func.is_view:
            new = [leaf if leaf.untyped_storage()._cdata not in given else None for leaf in made]
            self._operations.append((func, args, kwargs, new))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        """Do it all again."""
        for func, args, kwargs, made in self._operations:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for tensor, value in zip(made, again, strict=True):
                if tensor is not None:
                    tensor.copy_(value)


class Recorder:
    """What `fedssl.machine.cuda_graphs.CudaGraphCache` records with; counts what it recorded and did again."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        operations = Recorded()
        with operations:
            result = step()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            operations.replay()

        return replay, result
