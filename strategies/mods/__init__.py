"""The mods of all runs, in the order in which their hooks are called."""

from collections.abc import Sequence
from pathlib import Path

from fedssl.methods.base import SSLMethod
from strategies.mods.base import ClientMod, Mod
from strategies.mods.calibration import Calibration
from strategies.mods.held_layers import HeldLayers, HeldLayersClient
from strategies.mods.model_average import ModelAverage
from strategies.mods.norm_filter import NormFilter
from strategies.mods.privacy import Privacy
from strategies.mods.products import Products
from strategies.mods.ranks import Ranks, RanksClient
from strategies.mods.server_optimizer import ServerOptimizer
from strategies.run_context import RunContext

MODS: Sequence[type[Mod]] = (
    *(Calibration, HeldLayers, Ranks, NormFilter, Privacy, Products, ServerOptimizer),
    ModelAverage,
)


def make_mods(context: RunContext) -> tuple[Mod, ...]:
    """Return the server halves that a run uses."""
    made = (mod.make(context) for mod in MODS)
    return tuple(mod for mod in made if mod is not None)


def make_client_mods(method: SSLMethod, base_folders: Sequence[Path]) -> tuple[ClientMod, ...]:
    """Return the client halves, in order. Base layers are read from all ``base_folders`` and stored in the first."""
    return HeldLayersClient(method, base_folders), RanksClient(method)
