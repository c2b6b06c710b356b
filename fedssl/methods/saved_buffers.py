"""Buffers that a method assigns anew, as DINO's ``self.center = ...``, and that are exchanged and saved."""

import torch
from torch import Tensor, nn

from fedssl.errors import InputError


class SavedBuffers:
    """The saved buffers of a network, by module and key."""

    def __init__(self, network: nn.Module) -> None:
        self._places: list[tuple[str, dict[str, Tensor | None], str, Tensor]] = [
            (f"{name}.{key}".lstrip("."), module._buffers, key, tensor)
            for name, module in network.named_modules()
            for key, tensor in module._buffers.items()
            if tensor is not None and key not in module._non_persistent_buffers_set
        ]

    def restore(self) -> None:
        """Set the buffers again, with their own values: those that were assigned are lost."""
        for _, buffers, key, tensor in self._places:
            buffers[key] = tensor

    def keep(self) -> None:
        """Set the buffers again, with the values that were assigned; raises `InputError` for another shape or dtype."""
        for name, buffers, key, tensor in self._places:
            if (new := buffers[key]) is not tensor:
                buffers[key] = tensor
                if new is None or new.shape != tensor.shape:
                    found = "None" if new is None else f"one of shape {tuple(new.shape)}"
                    raise InputError(f"the buffer {name} of shape {tuple(tensor.shape)} became {found}; keep its shape")
                if not torch.can_cast(new.dtype, tensor.dtype):
                    raise InputError(f"the buffer {name} of {tensor.dtype} became one of {new.dtype}; keep its dtype")
                with torch.no_grad():
                    tensor.copy_(new.clone())  # it may be a view of the tensor
