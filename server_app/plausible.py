"""Which updates of a round are no honest client's: those that moved the model many times as far as most others did."""

import statistics
from collections.abc import Mapping

WHAT = ("weights", "running statistics")


def implausible(moved: Mapping[int, tuple[float, float]], *, factor: float) -> dict[int, str]:
    """Clients whose update is not plausible, with the reason.

    More than half of the clients must be honest, and with fewer than three nobody stands out.

    Parameters
    ----------
    moved : mapping of int to (float, float)
        How far a client moved, see `fedssl.arrays.Cosines`.
    factor : float
        How many times the median of the round is still plausible.
    """
    found: dict[int, str] = {}
    for what, ways in zip(WHAT, zip(*moved.values(), strict=True), strict=False):
        median = statistics.median(ways)
        for client, way in zip(moved, ways, strict=True):
            if way > factor * median:
                found.setdefault(
                    client,
                    f"its {what} moved {way / median:.3g} times as far as the median of the round, of which "
                    f"{factor:g} times are plausible (updates.norm_factor)",
                )
    return found
