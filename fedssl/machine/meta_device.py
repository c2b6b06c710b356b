"""Networks on torch's meta device: shapes without memory or numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build and run networks on the meta device inside the block."""
    with torch.device("meta"), _WithoutCompiler():
        yield


class _WithoutCompiler(TorchFunctionMode):
    """Computes the shapes for the functions of ResNets and of ``conv_small``; other functions use torch's kernels.

    Those of the meta device import torch's compiler: two seconds, and 80 MB of the process.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compute = _SHAPES.get(func, func)
        return compute(*args, **(kwargs or {}))


def _itself(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _same_shape(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty(x.shape)


def _relu(x: Tensor, inplace: bool = False) -> Tensor:
    return x if inplace else torch.empty(x.shape)


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return _slide(x, weight.shape[2:], stride, padding, dilation, channels=len(weight))


def _max_pool2d(
    x: Tensor, size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    if ceil_mode:
        return torch.max_pool2d(x, size, stride, padding, dilation, ceil_mode)
    return _slide(x, size, stride or size, padding, dilation, channels=x.shape[1])


def _slide(x: Tensor, *window: Any, channels: int) -> Tensor:
    """Return the output of a window with a size, a stride, a padding and a dilation."""
    lengths = [
        (length + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        for length, size, stride, padding, dilation in zip(x.shape[2:], *map(_pair, window), strict=True)
    ]
    return torch.empty(len(x), channels, *lengths)


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


def _adaptive_avg_pool2d(x: Tensor, size: Any) -> Tensor:
    heights_and_widths = zip(_pair(size), x.shape[2:], strict=True)
    return torch.empty(*x.shape[:2], *(length if wanted is None else wanted for wanted, length in heights_and_widths))


def _mean(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    averaged = range(x.ndim) if dim is None else [axis % x.ndim for axis in ((dim,) if isinstance(dim, int) else dim)]
    lengths = [1 if axis in averaged else length for axis, length in enumerate(x.shape)]
    return torch.empty([length for axis, length in enumerate(lengths) if keepdim or axis not in averaged])


_SHAPES: dict[Any, Any] = {
    Tensor.normal_: _itself,
    Tensor.uniform_: _itself,
    Tensor.add_: _itself,
    Tensor.mean: _mean,
    functional.batch_norm: _same_shape,
    functional.group_norm: _same_shape,
    functional.relu: _relu,
    torch.conv2d: _conv2d,
    torch.max_pool2d: _max_pool2d,
    functional.adaptive_avg_pool2d: _adaptive_avg_pool2d,
}
