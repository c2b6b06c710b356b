"""The Gram matrix of the clients' deviations from the global model: all that EUA and Krum know of them."""

from collections.abc import Sequence

import numpy as np
import torch

from fedssl.arrays import ROW, Layers, ReferenceLayers

_TILE = 8 * ROW  # numbers of each client in one product; sums in float32 of twice as many may err by 1e-6

_BLOCK = 16  # rows of the Gram matrix in one product, so that little more than its lower triangle is computed


def deviation_gram(weights: ReferenceLayers, models: Sequence[Layers], *, exact: bool = False) -> np.ndarray:
    """Inner products of theta - theta_k, each taken over all layers of ``weights`` as one vector.

    The global model is subtracted before anything is multiplied (deviations are small: with expanded products they
    would drown in rounding), tile by tile, so that the deviations never exist as a whole. One thread works on a layer,
    so that results do not depend on the number of threads.

    Parameters
    ----------
    weights : ReferenceLayers
        theta: floating-point layers.
    models : sequence of Layers
        theta_k; each has at least these layers.
    exact : bool
        Whether products are taken in float64, with errors of about 1e-15 of the product of the lengths. In float32,
        twice as fast, they are below 1e-6 of it, and about 1e-8 in models of millions of weights.

    Returns
    -------
    ndarray
        (K, K), symmetric, float64.
    """
    grams: dict[str, np.ndarray] = {}

    def measure(name: str) -> None:
        g = weights.layers[name].reshape(-1)
        dtype = np.dtype(np.float64) if exact else np.result_type(g.dtype, np.float32)
        grams[name] = _lower_triangle(g, [model[name].reshape(-1) for model in models], dtype)

    weights.parallel_for(measure)
    lower = sum((grams[name] for name in weights.layers), np.zeros((len(models), len(models))))
    return np.asarray(np.tril(lower) + np.tril(lower, -1).T)


def _lower_triangle(g: np.ndarray, clients: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """(K, K) products of w - g; what is above the diagonal has no meaning."""
    number = len(clients)
    origin, arrays = torch.from_numpy(g), [torch.from_numpy(w) for w in clients]
    total, part = np.zeros((number, number)), np.zeros((number, number), dtype)
    buffer, products = torch.from_numpy(np.empty(number * min(_TILE, len(g)), dtype)), torch.from_numpy(part)
    for start in range(0, len(g), _TILE):
        tile = slice(start, start + _TILE)
        y = origin[tile].to(buffer.dtype)
        x = buffer[: number * len(y)].view(number, len(y))
        # Few long calls: threads that hand the interpreter over for each array would wait for each other.
        torch.stack([w[tile].to(x.dtype) for w in arrays], out=x)
        x -= y
        # torch's products stay on one thread here; those of NumPy's OpenBLAS have other bits on another number of them.
        for first in range(0, number, _BLOCK):
            end = first + _BLOCK
            torch.mm(x[first:end], x[:end].T, out=products[first:end, :end])
        total += part
    return total
