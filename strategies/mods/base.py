"""Base class of mods: features that change plans and updates on their way, apart from the strategy and the method.

A mod has a server half, a client half or both, in one module with its rules. Server halves are built once per run.
The order of all mods is that of `strategies.mods.MODS`, because it decides bits.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from fedssl.arrays import Cosines, GlobalLayers, Layers
from fedssl.config.settings import Settings
from fedssl.rules import Rule
from fedssl.wire.messages import ClientUpdate, TrainPlan
from strategies.round_start import RoundStart, StartingModel, UntrainedLayers
from strategies.rules import RoundExchange, RunParts
from strategies.run_context import RunContext
from strategies.types import Aggregator, GlobalModel
from strategies.update_store import UpdateStorage

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
    compares_updates : bool
        Whether it compares all updates of a round, by `measure` and `select`, before any of them is used.
    trains : bool
        Whether it trains models on the server.
    """

    settings_rules: ClassVar[Sequence[Rule[Settings]]] = ()
    run_rules: ClassVar[Sequence[Rule[RunParts]]] = ()
    round_rules: ClassVar[Sequence[Rule[RoundExchange]]] = ()
    sees_updates: ClassVar[bool] = False
    compares_updates: ClassVar[bool] = False
    trains: ClassVar[bool] = False

    @classmethod
    def make(cls, context: RunContext) -> "Mod | None":
        """Return the mod of a run; None if the run does not use it."""
        raise NotImplementedError

    def begin(self, model: GlobalModel, round: int) -> GlobalModel:
        """Return a model from which clients start a round."""
        return model

    def plan(self, plan: TrainPlan) -> TrainPlan:
        """Return the plan that all clients receive, still without layers."""
        return plan

    def send(self, sent: UntrainedLayers, client: int, at: RoundStart, *, last: int | None) -> UntrainedLayers:
        """Return what a client receives besides the layers that it trains.

        ``last`` is the round of its last used update that started from the same model; None if there is none, or if the
        client selects among several models.
        """
        return sent

    def variant(self, client: int, at: RoundStart) -> Hashable:
        """Return what of `exchanged` and `receive` depends on the client. Clients of equal variants share messages."""
        return None

    def exchanged(self, layers: Layers, variant: Any) -> Layers:
        """Return layers of a model as clients of a variant download and upload them."""
        return layers

    def receive(self, update: ClientUpdate, variant: Any, expected: GlobalLayers) -> ClientUpdate:
        """Return a validated update with the shapes of the ``expected`` layers of the model."""
        return update

    def measure(self, update: ClientUpdate, cosines: Cosines, start: StartingModel) -> Any:
        """Return what `select` compares of an update."""

    def select(self, measured: Mapping[int, Any]) -> Mapping[int, str]:
        """Return the clients whose updates are not used, with the reasons."""
        return {}

    def contribute(self, update: ClientUpdate, start: StartingModel) -> ClientUpdate:
        """Return an update as it is added to an aggregator. ``start`` is the model that its client started from."""
        return update

    def aggregator(
        self, inner: Aggregator, start: StartingModel, storage: UpdateStorage, *, round: int, name: str
    ) -> Aggregator:
        """Return the aggregator of a model in a round, around that of the strategy. It may return frozen layers."""
        return inner

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


class LayerCache(Protocol):
    """Layers that a client keeps beside its state, by names that a mod chooses."""

    def load(self, name: str, *, before: int) -> Layers:
        """Return the newest layers of a round before this one; none if there are none."""
        ...

    def save(self, name: str, layers: Layers, *, round: int, oldest_resumable: int) -> None:
        """Save layers after a round. Those that no run resumed from ``oldest_resumable`` needs are deleted."""
        ...


class ClientMod:
    """Client half of a mod, for all clients of a process. By default each hook returns its argument."""

    def download(self, plan: TrainPlan, cache: LayerCache) -> TrainPlan:
        """Return a plan as the strategy receives it; raises `RequestRefused`."""
        return plan

    def upload(self, layers: Layers, plan: TrainPlan) -> Layers:
        """Return the layers that the client uploads. ``plan`` is the received one."""
        return layers

    def keep(self, received: TrainPlan, plan: TrainPlan, cache: LayerCache) -> None:
        """Save what later rounds need, after the client's state. ``plan`` is the result of `download` of all mods."""


def exchanged_layers(mods: Sequence[Mod], layers: Layers, variants: Sequence[Hashable]) -> Layers:
    """Return layers as clients of these variants, one of each mod, exchange them; the argument if none changes them."""
    for mod, variant in zip(mods, variants, strict=False):
        layers = mod.exchanged(layers, variant)
    return layers
