"""Gram matrix of the clients' deviations from the global model, and the shortest vector in their convex hull.

EUA and Krum need no more of the updates than this matrix. The shortest vector is Eq. 10 of FedU2 (Liao et al., CVPR
2024). Eq. 12 of the paper gives the minimizer of a ridge: the derivative of the penalty in Eq. 11 is ``rho 1 1^T p``,
not ``rho I p``, and cutting a solution off at 0 does not minimize over p >= 0. Here non-negative least squares solves
Eq. 10 exactly.
"""

import numpy as np
import torch

from fedssl.arrays import BLAS_ROW, GlobalLayers, Layers, is_weight
from fedssl.errors import InputError
from strategies.update_store import UpdateStore

_PIECE = 8 * BLAS_ROW  # numbers of each client in one product; sums in float32 of twice as many may err by 1e-6
_MAX_PIECES = 16  # of each client in memory; more do not hide more of the overhead of a call
_TILE_NUMBERS = 2**22  # of all clients together in memory
_BLOCK = 32  # rows of the Gram matrix in one product, so that little more than its lower triangle is computed


def deviation_gram(weights: GlobalLayers, models: UpdateStore, *, exact: bool = False) -> np.ndarray:
    """Return the inner products of theta - theta_k, each over all layers of ``weights`` as one vector: float64, (K, K).

    The global model is subtracted before multiplication, tile by tile, because deviations are small: expanded products
    would lose them to rounding. The deviations are never in memory as a whole. One thread processes a layer, so that
    the results do not depend on the number of threads.

    ``weights`` are the floating-point layers theta, which each of the ``models`` theta_k has. ``exact`` computes
    products in float64, with errors of about 1e-15 of the product of the lengths. In float32, twice as fast, they are
    below 1e-6 of it, and about 1e-8 for models with millions of weights. The deviations of a pair of factors are those
    of its product, and always exact.
    """
    grams: dict[str, np.ndarray] = {}

    def measure(name: str) -> None:
        if name in weights.first_factors:
            return
        if name in weights.products:
            grams[name] = weights.deviation_products(name, factors_of(weights, name, models))
            return
        g = weights.layers[name].reshape(-1)
        dtype = np.dtype(np.float64) if exact else np.result_type(g.dtype, np.float32)
        grams[name] = _lower_triangle(g, name, models, dtype)

    weights.parallel_for(measure)
    lower = sum((grams[name] for name in weights.layers if name in grams), np.zeros((len(models), len(models))))
    return np.asarray(np.tril(lower) + np.tril(lower, -1).T)


def _lower_triangle(g: np.ndarray, name: str, models: UpdateStore, dtype: np.dtype) -> np.ndarray:
    """Return the (K, K) products of w - g. Entries above the diagonal are undefined."""
    number, origin, step = len(models), torch.from_numpy(g), _step(len(models))
    total = np.zeros((number, number))
    buffer = torch.from_numpy(np.empty(number * min(step, len(g)), dtype))
    for tile, arrays in models.tiles(name, step):
        y = origin[tile].to(buffer.dtype)
        x = buffer[: number * len(y)].view(number, len(y))
        # Few long calls: threads that release the interpreter lock for each array would wait for each other.
        torch.stack([torch.from_numpy(w).to(x.dtype) for w in arrays], out=x)
        x -= y
        end = len(y) // _PIECE * _PIECE
        pieces, rest = x[:, :end].view(number, -1, _PIECE).transpose(0, 1), x[:, end:]
        # torch uses one thread here. Results of NumPy's OpenBLAS depend on the number of threads.
        for first in range(0, number, _BLOCK):
            rows = slice(first, first + _BLOCK)
            products = torch.bmm(pieces[:, rows], pieces[:, : rows.stop].transpose(1, 2))
            total[rows, : rows.stop] += products.sum(0, dtype=torch.float64).numpy()
            total[rows, : rows.stop] += torch.mm(rest[rows], rest[: rows.stop].T).numpy()
    return total


def _step(number: int) -> int:
    """Return the numbers of each of these clients in a tile."""
    pieces = _TILE_NUMBERS // (max(number, 1) * _PIECE)
    return min(max(pieces, 1), _MAX_PIECES) * _PIECE


def factors_of(layers: GlobalLayers, name: str, models: UpdateStore) -> list[Layers]:
    """Return the factors of each model's product whose factor B has this name."""
    pair = layers.products[name]
    factors: list[Layers] = [{} for _ in range(len(models))]
    for factor in (pair.a, pair.b):
        if factor not in layers.layers:
            continue
        array = layers.layers[factor]
        for _, arrays in models.tiles(factor, array.size):
            for client_factors, values in zip(factors, arrays, strict=True):
                client_factors[factor] = values.reshape(array.shape)
    return factors


def gram_memory(layers: Layers, number: int, *, exact: bool) -> int:
    """Return about how many bytes `deviation_gram` of this number of updates in a file needs."""
    weights = [array for name, array in layers.items() if is_weight(name, array)]
    step = _step(number)
    widths = [min(step, array.size) * (8 if exact else max(array.itemsize, 4)) for array in weights]
    raw = [min(step + _PIECE, array.size) * array.itemsize for array in weights]
    tiles = torch.get_num_threads() * number * max(map(sum, zip(widths, raw, strict=True)), default=0)
    matrices = len(weights) + 2 * torch.get_num_threads() + 3  # one for each layer, and those in use
    return tiles + 8 * number**2 * matrices


def min_norm_weights(gram: np.ndarray, *, accuracy: float = 1e-12) -> np.ndarray:
    """Return the weights of the shortest vector in a convex hull: argmin p^T G p over p >= 0, sum p = 1 (Eq. 10).

    With x = s p, minimizing x^T G x + (sum x - 1)^2 is non-negative least squares: its minimum over the scale s is f /
    (1 + f), f = p^T G p, which increases with f. Lawson and Hanson's algorithm solves it exactly. If several p are
    optimal, equal vectors have equal weights.

    ``gram`` has the inner products of the K vectors, (K, K), of any scale and rank; a vector of zeros gets all the
    weight. ``accuracy`` is the error of the inner products relative to the lengths of both vectors; vectors that differ
    by less are equal.
    """
    from scipy.optimize import nnls  # here: only EUA needs it, and the import is slow

    gram = np.asarray(gram, np.float64)
    if gram.ndim != 2 or not 0 < gram.shape[0] == gram.shape[1] or not np.isfinite(gram).all():
        raise InputError(f"gram of shape {gram.shape} must be a square matrix of finite numbers")
    lengths = np.sqrt(np.maximum(np.diag(gram), 0))
    if not lengths.all():
        return np.asarray((lengths == 0) / np.count_nonzero(lengths == 0))
    # With x_k = p_k ||g_k|| the matrix is that of the cosines at every scale; sum p becomes b^T x up to a factor.
    cosines = gram / lengths[:, None] / lengths
    b = lengths.min() / lengths
    values, vectors = np.linalg.eigh(cosines)
    root = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T  # rounding may leave negative eigenvalues
    x, _ = nnls(np.vstack([root, b]), np.append(np.zeros(len(b)), 1.0), maxiter=100 * len(b))
    p = x * b
    squares = lengths**2
    distances = squares[:, None] + squares - 2 * gram
    first_equal = np.argmax(distances <= accuracy * np.outer(lengths, lengths), axis=1)
    for index in np.unique(first_equal):
        group = first_equal == index
        p[group] = p[group].mean()
    return np.asarray(p / p.sum())
