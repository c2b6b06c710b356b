"""Base class of mods: features that change plans and updates on their way, apart from the strategy and the method.

A mod has a server half, a client half or both, in one module with its rules. Server halves are built once per run.
The order of all mods is that of `strategies.mods.MODS`, because it decides bits.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from fedssl.arrays import Layers
from fedssl.config.settings import Settings
from fedssl.rules import Rule
from fedssl.wire.messages import ClientUpdate
from strategies.round_start import StartingModel
from strategies.rules import RoundExchange, RunParts
from strategies.run_context import RunContext
from strategies.types import GlobalModel

ModState = dict[str, Layers]  # of one model, by names that the mod chooses; layers as those of the model


class Mod:
    """Server half of a mod. By default each hook returns its argument.

    Attributes
    ----------
    settings_rules, run_rules, round_rules : sequence of callable
        Rules about the settings and about a built run, also if the run does not use the mod, and about what the clients
        of a round exchange, if it does.
    sees_updates : bool
        Whether it needs every update, so that no other process can sum them.
    trains : bool
        Whether it trains models on the server.
    """

    settings_rules: ClassVar[Sequence[Rule[Settings]]] = ()
    run_rules: ClassVar[Sequence[Rule[RunParts]]] = ()
    round_rules: ClassVar[Sequence[Rule[RoundExchange]]] = ()
    sees_updates: ClassVar[bool] = False
    trains: ClassVar[bool] = False

    @classmethod
    def make(cls, context: RunContext) -> "Mod | None":
        """Return the mod of a run; None if the run does not use it."""
        raise NotImplementedError

    def begin(self, model: GlobalModel, round: int) -> GlobalModel:
        """Return a model from which clients start a round."""
        return model

    def contribute(self, update: ClientUpdate, start: StartingModel) -> ClientUpdate:
        """Return an update as it is added to an aggregator. ``start`` is the model that its client started from."""
        return update

    def finish(
        self, layers: Layers, start: StartingModel, state: ModState, *, used: int, round: int
    ) -> tuple[Layers, ModState]:
        """Return the new layers of a model, from those that the aggregator returned for ``used`` updates.

        ``state`` is the second result of the model's previous round, empty before. It is in checkpoints.
        """
        return layers, state

    def end(self, model: GlobalModel, round: int) -> GlobalModel:
        """Return a model after a round, with its new state."""
        return model

    def record(self, round: int, *, dropped: Collection[int]) -> Mapping[str, Any]:
        """Return entries for the line of a round that ended. ``dropped`` are the clients without a usable update."""
        return {}
