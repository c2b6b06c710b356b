"""An estimate of the memory of a training step, from the shapes of all tensors."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.config.component import Component
from fedssl.config.settings import ClientSettings
from fedssl.errors import InputError, RequestRefused
from fedssl.machine.meta_device import shapes_only
from fedssl.methods.base import build_method
from fedssl.regularizers.base import Regularizer
from strategies.base import make_strategy


@dataclass(frozen=True)
class StepMemory:
    """Estimated bytes of a training step: ``fixed`` and those of each image of the batch."""

    fixed: int
    per_image: int

    def of_batch(self, batch_size: int) -> int:
        return self.fixed + batch_size * self.per_image

    def largest_batch(self, allowed: int) -> int:
        """Return the largest power of two whose batch takes at most ``allowed`` bytes; 0 if there is none."""
        fitting = max(0, (allowed - self.fixed) // self.per_image)
        return 2 ** (fitting.bit_length() - 1) if fitting else 0


def estimate_step_memory(settings: ClientSettings) -> StepMemory:
    """Estimate the memory of a training step, without computing or allocating anything.

    Weights with gradients and the optimizer's moments, and once more in the layout of torch's kernels; the copies of
    models that the regularizer and the strategy use; two views of a batch, and the matrices of crop and blur along both
    axes; and the outputs of all modules of the encoder. Of the stages that the tuning freezes, whose outputs are freed,
    only the two largest outputs count. It is that of a process which keeps no freed memory.
    """
    data = settings.data
    kept, freed = [0], [0, 0]  # bytes of the outputs in stages that are trained, and in the others

    def count(outputs: list[int], module: nn.Module, inputs: Any, output: Any) -> None:
        in_place = output is inputs[0]
        outputs.append(output.nbytes if isinstance(output, Tensor) and not in_place else 0)

    try:
        with shapes_only():
            method = build_method(settings.model)
            regularizer = settings.training.regularizer.make(Regularizer)
            if regularizer.uses_initial_encoder:
                method.keep_initial_encoder()
            client = make_strategy(settings.strategy).client
            copies = regularizer.copied_bytes(method) + client.copied_bytes(method)
            encoder = method.encoder
            for name, module in encoder.named_modules():
                if not list(module.children()):
                    is_frozen = encoder.stage_range(name).frozen_from <= encoder.frozen_stages
                    module.register_forward_hook(partial(count, freed if is_frozen else kept))
            method.encoder(torch.empty(2, data.channels, data.size, data.size))
    except InputError:
        raise
    except Exception as error:  # a user's encoder or method may raise anything
        raise RequestRefused(
            f"the memory of {settings.model.encoder.name} cannot be estimated ({type(error).__name__})"
        ) from error
    weights, trained = method.bytes_of(method.named_tensors), method.bytes_of(method.trainable)
    views = 2 * (data.channels + 4) * data.size**2 * 4
    return StepMemory(
        fixed=weights + copies + (2 + _num_moments(settings.training.optimizer)) * trained,
        per_image=views + sum(kept) + sum(sorted(freed)[-2:]),
    )


def _num_moments(optimizer: Component) -> int:
    """Return how many numbers per weight an optimizer keeps: of torch's, SGD has at most one, others at most two."""
    if optimizer.name == "SGD":
        return 1 if optimizer.values.get("momentum") else 0
    return 2
