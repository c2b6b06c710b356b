"""Which updates of a round are no honest client's: those that moved the model many times as far as most others did."""

import statistics
from collections.abc import Mapping

PARTS = ("weights", "running statistics")


def norm_outliers(norms_of: Mapping[int, tuple[float, float]], *, factor: float) -> dict[int, str]:
    """Clients whose update is not plausible, with the reason.

    More than half of the clients must be honest, and with fewer than three nobody stands out.

    Parameters
    ----------
    norms_of : mapping of int to (float, float)
        How far a client moved, see `fedssl.arrays.Cosines`.
    factor : float
        How many times the median of the round is still plausible.
    """
    outliers: dict[int, str] = {}
    for what, norms in zip(PARTS, zip(*norms_of.values(), strict=True), strict=False):
        median = statistics.median(norms)
        for client, norm in zip(norms_of, norms, strict=True):
            if norm > factor * median:
                outliers.setdefault(
                    client,
                    f"its {what} moved {norm / median:.3g} times as far as the median of the round, of which "
                    f"{factor:g} times are plausible (aggregation.max_norm_ratio)",
                )
    return outliers
