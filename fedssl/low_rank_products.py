"""Products of LoRA's factors (Hu et al., arXiv 2106.09685): W becomes W + scale * B A.

Norms, sums and differences of products are computed from B and A.

Inner products are <B_1 A_1, B_2 A_2> = sum((B_1^T B_2) * (A_1 A_2^T)): O((m + n) r^2) instead of O(m n). Everything is
computed in float64. The error is about 1e-16 times the product of the lengths of the factors, so differences are formed
from the differences of the factors (`LowRank.minus`), which vanish with them. torch computes on the caller's number of
threads; inside `fedssl.arrays.GlobalLayers.parallel_for` that is one, and the bits depend on nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRankLayer:
    """Names of the factors of the product ``scale * B A`` that is added to one weight."""

    weight: str  # name of the weight, and of the product
    a: str  # name of A, (r, n)
    b: str  # name of B, (m, r)
    scale: float  # alpha / r


@dataclass(frozen=True, eq=False)
class LowRank:
    """The matrix ``scale * b @ a``, of which only the factors are stored."""

    b: np.ndarray  # (m, r)
    a: np.ndarray  # (r, n)
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """Return (m, n)."""
        return self.b.shape[0], self.a.shape[1]

    @property
    def rank(self) -> int:
        """Return r, an upper bound of the rank of the matrix."""
        return int(self.a.shape[0])

    def inner(self, other: "LowRank") -> float:
        """Return the sum of the elementwise products with a matrix of the same shape."""
        (b, a), (other_b, other_a) = self._factors(), other._factors()
        return float(((b.T @ other_b) * (a @ other_a.T)).sum())

    def square(self) -> float:
        """Return the sum of squares, at least 0."""
        return max(self.inner(self), 0.0)  # rounding may make it negative

    def minus(self, other: "LowRank") -> "LowRank":
        """Return the difference from a matrix of the same shape, with the sum of both ranks.

        With equal ranks it is (B_1 - B_2) A_1 + B_2 (A_1 - A_2), which is exactly 0 for equal factors.
        """
        (b, a), (other_b, other_a) = self._factors(), other._factors()
        if self.rank == other.rank:
            return LowRank(torch.hstack((b - other_b, other_b)).numpy(), torch.vstack((a, a - other_a)).numpy())
        return LowRank(torch.hstack((b, -other_b)).numpy(), torch.vstack((a, other_a)).numpy())

    def truncate(self, rank: int) -> "LowRank":
        """Return the nearest matrix of this rank, at most ``min(m, n)`` (Eckart-Young), with the scale of this one.

        The singular value decomposition U S V^T is that of the product of the factors' triangular matrices. The new
        factors are U S / scale and V^T, with descending singular values, so that the leading columns and rows are the
        nearest matrix of a smaller rank. Rows of V^T whose singular value is 0 have length 1, so that training can use
        them. The largest number of each row is positive.
        """
        b, a = self._factors()
        missing = max(rank - self.rank, 0)
        if missing:
            b, a = torch.nn.functional.pad(b, (0, missing)), torch.vstack((a, torch.eye(missing, a.shape[1]).to(a)))
        (b_vectors, b_triangle), (a_vectors, a_triangle) = torch.linalg.qr(b), torch.linalg.qr(a.T)
        u, s, vt = torch.linalg.svd(b_triangle @ a_triangle.T, full_matrices=False)
        rows = vt[:rank] @ a_vectors.T
        columns = b_vectors @ (u * s)[:, :rank]
        signs = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True)).sign()
        return LowRank((columns * signs.T / self.scale).numpy(), (rows * signs).numpy(), self.scale)

    def dense(self) -> np.ndarray:
        """Return the matrix, float64 ``(m, n)``."""
        b, a = self._factors()
        return np.asarray((b @ a).numpy())

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return scale times b, and a, in float64."""
        return _as_float64(self.b) * self.scale, _as_float64(self.a)


def _as_float64(array: np.ndarray) -> Tensor:
    """Return a copy, because torch warns of arrays that are read-only."""
    return torch.from_numpy(array.astype(np.float64))


def stack(coefficients: Sequence[float], products: Sequence[LowRank]) -> LowRank:
    """Return ``sum_k c_k P_k``, exactly: its factors are those of all products side by side."""
    factors = [product._factors() for product in products]
    b = torch.hstack([c * one for c, (one, _) in zip(coefficients, factors, strict=True)])
    return LowRank(b.numpy(), torch.vstack([one for _, one in factors]).numpy())


def deviation_products(initial: LowRank, products: Sequence[LowRank]) -> np.ndarray:
    """Return the inner products of P_k - P, P the ``initial`` product: float64, (K, K). All ranks are equal."""
    number, width = len(products), 2 * initial.rank
    if not number:
        return np.zeros((0, 0))
    deviations = [product.minus(initial) for product in products]
    b = torch.hstack([torch.from_numpy(one.b) for one in deviations])
    a = torch.vstack([torch.from_numpy(one.a) for one in deviations])
    gram = torch.empty(number, number, dtype=torch.float64)
    for row, one in enumerate(deviations):
        terms = (torch.from_numpy(one.b).T @ b) * (torch.from_numpy(one.a) @ a.T)
        gram[row] = terms.view(width, number, width).sum(dim=(0, 2))
    return np.asarray(gram.numpy())


def cut_factors(layers: Mapping[str, np.ndarray], pairs: Sequence[LowRankLayer], rank: int) -> dict[str, np.ndarray]:
    """Return the layers with the first ``rank`` columns of every factor B and rows of every factor A."""
    columns, rows = {pair.b for pair in pairs}, {pair.a for pair in pairs}
    return {
        name: array[:, :rank] if name in columns else array[:rank] if name in rows else array
        for name, array in layers.items()
    }


def sort_factors(layers: Mapping[str, np.ndarray], pairs: Sequence[LowRankLayer]) -> dict[str, np.ndarray]:
    """Return the layers with the factors of the same products whose leading ones are the best of each smaller rank."""
    changed = dict(layers)
    for pair in pairs:
        if pair.a in layers and pair.b in layers:
            a, b = layers[pair.a], layers[pair.b]
            best = LowRank(b, a, pair.scale).truncate(len(a))
            changed |= {pair.a: best.a.astype(a.dtype), pair.b: best.b.astype(b.dtype)}
    return changed


def pad_factors(
    layers: Mapping[str, np.ndarray], pairs: Sequence[LowRankLayer], shapes: Mapping[str, Sequence[int]]
) -> dict[str, np.ndarray]:
    """Return the layers with zeros in the missing columns of every factor B and rows of every factor A.

    The product stays, and training keeps the zeros: the gradient of each factor is a product with the other one.
    ``shapes`` are those of the factors afterwards, by name. A factor of a larger rank is returned unchanged.
    """
    padded = dict(layers)
    for name, axis in ((name, axis) for pair in pairs for name, axis in ((pair.a, 0), (pair.b, 1))):
        if name in layers and layers[name].ndim == 2:
            width = [(0, 0), (0, 0)]
            width[axis] = (0, shapes[name][axis] - layers[name].shape[axis])
            if width[axis] > (0, 0):
                padded[name] = np.pad(layers[name], width)
    return padded


@dataclass(frozen=True)
class FactorPairs:
    """The layers that are factors of products; ``fixed`` are factors A by name that are not exchanged."""

    layers: tuple[LowRankLayer, ...] = ()
    fixed: Mapping[str, np.ndarray] = field(default_factory=dict)

    def product(self, pair: LowRankLayer, layers: Mapping[str, np.ndarray]) -> LowRank:
        """Return the product of a pair whose factors are in ``layers``, or A in ``fixed``."""
        return LowRank(layers[pair.b], layers[pair.a] if pair.a in layers else self.fixed[pair.a], pair.scale)


NO_PAIRS = FactorPairs()
