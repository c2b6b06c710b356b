"""Names of LoRA's factors (Hu et al., arXiv 2106.09685): a layer's weight W becomes W + scale * B A."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LowRankLayer:
    """The product ``scale * B A`` that is added to one weight."""

    weight: str  # name of the weight, and of the product
    a: str  # name of A, (r, n)
    b: str  # name of B, (m, r)
    scale: float  # alpha / r
