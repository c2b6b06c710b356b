"""Layers that a client holds: base layers, frozen stages and static parts of the method's server side.

The server sends them once, and leaves them out when a client that holds them trains again. Base layers are those that
nothing changes, identified by a digest (`fedssl.base_layers`); a device may also have them from its owner. A client
keeps base layers in files that its runs share, and the other layers beside its state.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedssl.base_layers import check_base, layers_digest, load_base, save_base
from fedssl.errors import RequestRefused
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import load_layers, names_in_parts, part_name
from fedssl.schedule.phases import phase_at
from fedssl.schedule.stages import frozen_names
from fedssl.wire.messages import TrainPlan
from strategies.mods.base import ClientMod, LayerCache, Mod
from strategies.round_start import RoundStart, UntrainedLayers
from strategies.run_context import RunContext

FROZEN, STATIC = "frozen", "constant"  # names in the cache of a client


class HeldLayers(Mod):
    """Leaves out what a client holds."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._base, self._digest = context, context.base, layers_digest(context.base)
        self._dropped: set[int] = set()  # clients that may lack base layers although they reported them

    @classmethod
    def make(cls, context: RunContext) -> "HeldLayers | None":
        holds = context.base or context.method.static_parts or context.clients_cache_frozen
        return cls(context) if holds else None

    def plan(self, plan: TrainPlan) -> TrainPlan:
        return replace(plan, base_digest=self._digest, cache_frozen=self._context.clients_cache_frozen)

    def send(self, sent: UntrainedLayers, client: int, at: RoundStart, *, last: int | None) -> UntrainedLayers:
        is_known = client in at.state.last_participation
        held = self._context.method.static_parts if is_known else ()  # static parts are the same for all models
        return UntrainedLayers(
            frozen=self._missing_frozen(sent.frozen, last),
            broadcast={layer: array for layer, array in sent.broadcast.items() if part_name(layer) not in held},
            base={} if self._has_base(client, at) else self._base,
        )

    def record(self, round: int, *, dropped: Collection[int]) -> Mapping[str, Any]:
        self._dropped.update(dropped)
        return {}

    def _has_base(self, client: int, at: RoundStart) -> bool:
        """Return whether a client has the base layers: of an earlier round, or of its owner.

        Another attempt at a round sends them to all clients, which may have lost them.
        """
        info = at.info_of(client)
        reported = info is not None and self._digest in info.base_digests and client not in self._dropped
        return not at.attempt and (reported or client in at.state.last_participation)

    def _missing_frozen(self, names: tuple[str, ...], last: int | None) -> tuple[str, ...]:
        """Return the names of frozen layers that a client did not receive in a round in which they were frozen already.

        LW-FedSSL's Table 2 (Tun et al., arXiv 2401.11647) follows from this, and so do the downloads of a client that
        joins late or missed a stage (end of Section 5.2). With calibration the server changes all stages in every
        round, so they are sent every time.
        """
        context = self._context
        if last is None or not context.clients_cache_frozen:
            return names
        held = context.stages.frozen(phase_at(context.phases, last), names)
        return tuple(name for name in names if name not in held)


class HeldLayersClient(ClientMod):
    """Completes plans by the layers that the client holds, and keeps new ones. Base layers are loaded once."""

    def __init__(self, method: SSLMethod, base_folders: Sequence[Path]) -> None:
        self._method, self._base_folders = method, base_folders
        self._base_digest = ""  # of the base layers that are loaded

    def download(self, plan: TrainPlan, cache: LayerCache) -> TrainPlan:
        self._load_base(plan)
        layers, broadcast = plan.layers, plan.broadcast
        if plan.num_frozen_stages:
            layers = cache.load(FROZEN, before=plan.round) | layers
        if not set(names_in_parts(self._method, self._method.broadcast_parts)) <= broadcast.keys():
            broadcast = cache.load(STATIC, before=plan.round) | broadcast
        return replace(plan, layers=layers, broadcast=broadcast)

    def keep(self, received: TrainPlan, plan: TrainPlan, cache: LayerCache) -> None:
        frozen = frozen_names(self._method) if plan.cache_frozen else []
        static = names_in_parts(self._method, self._method.static_parts)
        downloaded = {*received.layers, *received.broadcast}
        for name, names, layers in ((FROZEN, frozen, plan.layers), (STATIC, static, plan.broadcast)):
            if not downloaded.isdisjoint(names):  # else the server sends none of them again
                kept = {layer: layers[layer] for layer in names}
                cache.save(name, kept, round=plan.round, oldest_resumable=plan.oldest_resumable_round)

    def _load_base(self, plan: TrainPlan) -> None:
        """Load the base layers of the plan or of a file, once per process; refuse the plan if it lacks them."""
        names = self._method.base_names
        if bool(names) != bool(plan.base_digest):
            raise RequestRefused("the plan has base layers but the settings do not, or the reverse")
        if plan.base_digest == self._base_digest:
            return
        like = {name: self._method.named_tensors[name] for name in names}
        if not plan.base:
            base = load_base(self._base_folders, like=like, digest=plan.base_digest)
            if base is None:
                raise RequestRefused(f"the client lacks the base layers {plan.base_digest}, and the plan has none")
        else:
            base = plan.base
            try:
                check_base(base, like=like, digest=plan.base_digest)
            except ValueError as error:
                raise RequestRefused(f"the base layers of the plan are refused: {error}") from error
            save_base(self._base_folders[0], base, digest=plan.base_digest)
        load_layers(self._method, base)
        self._base_digest = plan.base_digest
