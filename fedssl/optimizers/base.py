"""Base class of optimizers whose gradient takes more than one forward and backward pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


class SeveralPasses(Optimizer):
    """Optimizer that computes the gradient itself; its ``step`` follows. A torch optimizer is the other base class."""

    def compute_gradient(
        self, backward: Callable[[], Tensor], buffers: Sequence[Tensor], generators: Sequence[torch.Generator] = ()
    ) -> Tensor:
        """Set the gradients of all parameters, and return the loss, detached.

        ``backward`` computes the gradients at the current weights, clips them, and returns the loss. It changes
        ``buffers``, the method's running statistics, queues and the like, and ``generators``, from which all passes
        must draw the same numbers; both must be those of a single call at the end. CUDA graphs capture this, so that
        nothing may wait for the device.
        """
        raise NotImplementedError
