"""The mods of all runs, in the order in which their hooks are called."""

from collections.abc import Sequence

from strategies.mods.base import Mod
from strategies.mods.calibration import Calibration
from strategies.mods.norm_filter import NormFilter
from strategies.mods.privacy import Privacy
from strategies.mods.products import Products
from strategies.mods.ranks import Ranks
from strategies.mods.server_optimizer import ServerOptimizer
from strategies.run_context import RunContext

MODS: Sequence[type[Mod]] = (Calibration, Ranks, NormFilter, Privacy, Products, ServerOptimizer)


def make_mods(context: RunContext) -> tuple[Mod, ...]:
    """Return the server halves that a run uses."""
    made = (mod.make(context) for mod in MODS)
    return tuple(mod for mod in made if mod is not None)
