"""Gram matrix of the clients' deviations from the global model, and the shortest vector in their convex hull.

EUA and Krum need no more of the updates than this matrix. The shortest vector is Eq. 10 of FedU2 (Liao et al., CVPR
2024). Eq. 12 of the paper gives the minimizer of a ridge: the derivative of the penalty in Eq. 11 is ``rho 1 1^T p``,
not ``rho I p``, and cutting a solution off at 0 does not minimize over p >= 0. Here ADMM has the former and a split
variable for the latter, and its solution is completed to the exact one.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fedssl.arrays import ROW, Layers, ReferenceLayers
from fedssl.errors import InputError

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


_RHO = 1.0  # penalty of the paper

# A few suffice. Where it takes thousands, objectives differ by little more than rounding.
_MAX_STEPS = 1 << 16


def min_norm_weights(gram: np.ndarray, *, accuracy: float = 1e-12) -> np.ndarray:
    """Weights of the shortest vector in a convex hull: the p that minimises p^T G p with p >= 0 and sum p = 1.

    ADMM finds which weights are positive and near to what they are; then the nearest point that solves the optimality
    conditions exactly is taken, as soon as it fulfils them for all vectors. Where several p are optimal, equal vectors
    have equal weights.

    Parameters
    ----------
    gram : ndarray
        (K, K), inner products of the K vectors, of any scale and rank. A vector of zeros takes all the weight.
    accuracy : float
        Error of the inner products relative to the lengths of both vectors. Weights that depend on less are made equal.

    Returns
    -------
    ndarray
        (K,) in float64, on the simplex.

    Raises
    ------
    InputError
        No square matrix of finite numbers.
    """
    gram = np.asarray(gram, np.float64)
    if gram.ndim != 2 or not 0 < gram.shape[0] == gram.shape[1] or not np.isfinite(gram).all():
        raise InputError(f"gram of shape {gram.shape} must be a square matrix of finite numbers")
    lengths = np.sqrt(np.maximum(np.diag(gram), 0))
    if not lengths.all():
        return np.asarray((lengths == 0) / np.count_nonzero(lengths == 0))
    # In q_k = p_k ||g_k|| the matrix is that of cosines, whatever the lengths; sum p = 1 becomes b^T q = constant.
    cosines = gram / lengths[:, None] / lengths
    b = lengths.min() / lengths
    # Rounding may leave negative eigenvalues, with which there are several minima or none.
    cosines[np.diag_indices_from(cosines)] += max(0.0, -np.linalg.eigvalsh(cosines)[0])
    q = _admm(cosines, b / np.linalg.norm(b), accuracy)
    p = q * b
    return np.asarray(p / p.sum())


def _admm(c: np.ndarray, b: np.ndarray, accuracy: float) -> np.ndarray:
    """The q that minimises q^T C q with b^T q = 1 and q >= 0; ||b|| = 1 and C has a unit diagonal."""
    number = len(b)
    # Eq. 11 with a second constraint q = z, z >= 0. Each multiplier is divided by its penalty; that of the split is the
    # mean curvature along b^T q = 1, without which deviations that hardly differ would take very many steps.
    split = max((number - b @ c @ b) / max(number - 1, 1), accuracy * number)
    inverse = np.linalg.inv(c + _RHO * np.outer(b, b) + split * np.eye(number))
    z = b / (b @ b)
    mu, nu = 0.0, np.zeros(number)
    check = 1
    for step in range(_MAX_STEPS):
        if step + 1 == check:
            exact = _exact(c, b, z, accuracy)
            if exact is not None:
                return exact
            check *= 2
        q = inverse @ (_RHO * (1 - mu) * b + split * (z - nu))  # Eq. 12, first line
        z = np.maximum(q + nu, 0)
        nu += q - z
        mu += b @ q - 1  # Eq. 12, second line
    return np.asarray(z)


def _exact(c: np.ndarray, b: np.ndarray, near: np.ndarray, accuracy: float) -> np.ndarray | None:
    """The optimum nearest to ``near`` with the same positive entries, or None if there is none."""
    support = np.flatnonzero(near)
    size = len(support)
    # C q = f b and b^T q = 1, f = q^T C q; least squares, because vectors may depend on each other.
    system = np.zeros((size + 1, size + 1))
    system[:size, :size] = c[np.ix_(support, support)]
    system[:size, size], system[size, :size] = -b[support], b[support]
    guess = np.append(near[support], near @ c @ near)
    target = np.append(np.zeros(size), 1.0)
    found = guess + np.linalg.lstsq(system, target - system @ guess, rcond=accuracy)[0]
    q = np.zeros(len(b))
    q[support] = np.maximum(found[:size], 0)
    if not b @ q > 0:
        return None
    q /= b @ q
    slope = c @ q
    return q if np.all(slope - (q @ slope) * b >= -accuracy * q.sum()) else None
