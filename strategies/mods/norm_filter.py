"""Filter of updates by their norms: an update that moved much farther than the median of the round is not used."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedssl.arrays import Cosines, GlobalLayers, Layers, relative_norm
from fedssl.wire.messages import ClientUpdate
from strategies.low_rank_aggregation import REPLACING_FACTORS, low_rank_aggregation
from strategies.mods.base import Mod
from strategies.round_start import StartingModel
from strategies.run_context import RunContext

UPDATE_PARTS = ("weights", "running statistics", "low-rank factors")


def factor_change(start: GlobalLayers, layers: Layers) -> float:
    """Return the distance of LoRA's factors from their initial values, as one vector, as `Cosines.relative_change`.

    A product is small if one of its factors is, however large the other one. The mean of such factors is not.
    """
    initial = {name: start.layers[name].astype(np.float64) for name in sorted(start.factors)}
    change = sum(float(np.square(layers[name] - array).sum()) for name, array in initial.items())
    return relative_norm(change, sum(float(np.square(array).sum()) for array in initial.values()))


def norm_outliers(norms_of: Mapping[int, tuple[float, ...]], *, factor: float) -> dict[int, str]:
    """Return the clients whose update norm is more than ``factor`` times the median of the round, with the reason.

    More than half of the clients must be honest. With fewer than three clients there are no outliers. ``norms_of`` has
    the relative changes by client, see `NormFilter.measure`.
    """
    outliers: dict[int, str] = {}
    if len(norms_of) < 3:
        return outliers
    for what, norms in zip(UPDATE_PARTS, zip(*norms_of.values(), strict=True), strict=False):
        median = statistics.median(norms)
        for client, norm in zip(norms_of, norms, strict=True):
            if norm > factor * median:
                ratio = norm / median if median else math.inf
                reason = (
                    f"its {what} moved {ratio:.3g} times as far as the median of the round, of which "
                    f"{factor:g} times are plausible (aggregation.max_norm_ratio)"
                )
                outliers.setdefault(client, reason)
    return outliers


class NormFilter(Mod):
    """Drops updates whose norm is more than ``factor`` times the median.

    With ``compares_factors`` LoRA's factors are compared besides their products.
    """

    sees_updates = True
    compares_updates = True

    def __init__(self, factor: float, *, compares_factors: bool) -> None:
        self._factor, self._compares_factors = factor, compares_factors

    @classmethod
    def make(cls, context: RunContext) -> "NormFilter | None":
        factor = context.settings.aggregation.max_norm_ratio
        if factor is None:
            return None
        return cls(factor, compares_factors=low_rank_aggregation(context.settings) not in REPLACING_FACTORS)

    def measure(self, update: ClientUpdate, cosines: Cosines, start: StartingModel) -> tuple[float, ...]:
        """Return the relative change of each of `UPDATE_PARTS`; that of factors only if they are compared."""
        if not self._compares_factors:
            return cosines.relative_change
        return (*cosines.relative_change, factor_change(start.expected_upload, update.layers))

    def select(self, measured: Mapping[int, Any]) -> Mapping[int, str]:
        return norm_outliers(measured, factor=self._factor)
