"""Aggregation of LoRA's products: the mean of factors is not the factor of the mean.

A linear strategy gives the new product P' = c_0 P + sum_k c_k P_k, with P = s B A from which the clients started and
P_k = s B_k A_k (`strategies.types.LinearAggregator`). Its own layers B' and A' are the same combinations of the
factors, and s B' A' differs from P' by terms such as B_1 A_2. ``tuning.aggregation`` selects what becomes of P':

- ``factors`` (FedIT, Zhang et al., arXiv 2305.05644): B' and A', the product is approximate;
- ``freeze_a`` (FFA-LoRA, Sun et al., arXiv 2403.12313): nobody trains A, so that s B' A = P';
- ``exact`` (FedEx-LoRA, Singhal et al., arXiv 2410.09432): B' and A', and the weight becomes W + P' - s B' A';
- ``stack`` (FLoRA, Wang et al., arXiv 2409.05976): the weight becomes W + P', and clients start from B = 0;
- ``svd`` (FlexLoRA, Bai et al., arXiv 2402.11505): the factors of the nearest product of rank r.

P' is never formed: its factors are those of all clients side by side (`fedssl.low_rank_products.stack`). W + P' is a
layer that clients download and do not upload (`fedssl.methods.base.SSLMethod.server_merged_names`).
"""

import math
from collections.abc import Mapping

import numpy as np

from fedssl.config.settings import Settings
from fedssl.low_rank_products import LowRank, stack
from fedssl.seeding import numpy_generator
from strategies.types import Combination

# Aggregations that need the strategy's product, and those of them that add it to the weight.
OF_PRODUCTS = ("exact", "stack", "svd")
CHANGING_WEIGHTS = ("exact", "stack")
# Those whose new factors depend on the products alone. The others combine the factors, which must have one rank.
REPLACING_FACTORS = ("stack", "svd")


def low_rank_aggregation(settings: Settings) -> str:
    """Return what becomes of LoRA's products; "factors" without LoRA."""
    return str(settings.model.tuning.values.get("aggregation", "factors"))


def combine(combination: Combination, initial: LowRank, products: Mapping[int, LowRank]) -> LowRank:
    """Return P' from the initial product and those of the clients, by client id. Its rank is the sum of theirs."""
    terms = [(combination.initial, initial)]
    terms += [(combination.clients.get(client, 0.0), product) for client, product in products.items()]
    used = [(coefficient, product) for coefficient, product in terms if coefficient] or [(0.0, initial)]
    return stack(*zip(*used, strict=True))


def exact_weight(weight: np.ndarray, product: LowRank, factors: LowRank) -> np.ndarray:
    """Return W + P' - s B' A' (FedEx-LoRA): with the new factors it is the aggregated weight."""
    return stacked_weight(weight, product.minus(factors))


def stacked_weight(weight: np.ndarray, product: LowRank) -> np.ndarray:
    """Return W + P' (FLoRA), in the shape and dtype of the weight. It is computed in float64."""
    return np.asarray((weight + product.dense().reshape(weight.shape)).astype(weight.dtype))


def nearest_factors(product: LowRank, initial: LowRank) -> LowRank:
    """Return the factors of the product of the initial rank that is nearest to P' (FlexLoRA), in the initial dtypes.

    Singular vectors have either sign. They get that of the initial factors, which they resemble if the product changes
    little. Factors of several rounds have no common basis nevertheless.
    """
    nearest = LowRank(product.b / initial.scale, product.a, initial.scale).truncate(initial.rank)
    similarity = (nearest.a * initial.a).sum(axis=1) + (nearest.b * initial.b).sum(axis=0)
    signs = np.where(similarity < 0, -1.0, 1.0)
    a, b = nearest.a * signs[:, None], nearest.b * signs
    return LowRank(b.astype(initial.b.dtype), a.astype(initial.a.dtype), initial.scale)


def initial_factors(product: LowRank, *, seed_path: tuple[int | str, ...]) -> LowRank:
    """Return new factors of a product of zero, in the shapes and dtypes of ``product``: A uniform, and B zero.

    A is up to 1 / sqrt(n), as in PEFT and as the weight of a linear layer.
    """
    bound = 1 / math.sqrt(product.a.shape[1])
    generator = numpy_generator(int(seed_path[0]), *seed_path[1:])
    a = generator.uniform(-bound, bound, product.a.shape).astype(product.a.dtype)
    return LowRank(np.zeros_like(product.b), a, product.scale)
