"""The shortest vector in a convex hull, from inner products alone: Eq. 10 of FedU2 (Liao et al., CVPR 2024).

Eq. 12 of the paper gives the minimiser of a ridge: the derivative of the penalty in Eq. 11 is ``rho 1 1^T p``, not
``rho I p``, and cutting a solution off at 0 does not minimise over p >= 0. Here ADMM has the former and a split
variable for the latter, and its solution is completed to the exact one.
"""

import numpy as np

from fedssl.errors import InputError

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
