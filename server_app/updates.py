"""Updates of clients: read them, filter outliers, and apply stale ones."""

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flwr.app import Message

from fedssl.arrays import Cosines, GlobalLayers
from fedssl.errors import shortened
from fedssl.safe_io import sanitize_line
from fedssl.wire.device import code_fingerprint
from fedssl.wire.messages import ClientUpdate, TrainPlan
from fedssl.wire.records import content_bytes
from server_app.federation import Federation
from server_app.policies import apply_stale_update
from server_app.validation import UpdateValidator, read_model_index
from strategies.base import ServerStrategy
from strategies.mods.base import Mod, exchanged_layers
from strategies.round_start import ClientAssignment, StartingModel
from strategies.types import GLOBAL
from strategies.update_store import UpdateStorage, UpdateStore


@dataclass(frozen=True)
class ClientMetrics:
    """Metrics of one client in a round. The fields are the keys of ``clients.jsonl``.

    ``model`` is the name of the model that the client started from. ``cosine`` has the cosine of every layer with it,
    ``model_cosine`` the cosine of all weights as one vector (L-DAWA, Eq. 2 and Fig. 4), and ``layer_cosine`` the mean
    over layers, see `fedssl.arrays.Cosines`; None if no weights were exchanged. ``staleness`` is the number of rounds
    since the plan that the client answered.
    """

    round: int
    client: int
    model: str
    loss: float | None
    seconds: float | None
    bytes_up: int
    bytes_down: int
    examples: int | None
    cosine: dict[str, float]
    model_cosine: float | None
    layer_cosine: float | None
    staleness: int = 0
    virtual_seconds: float | None = None  # of the client's round; None in wall-clock time
    base_bytes: int = 0  # bytes of base layers among ``bytes_down``

    def line(self) -> dict[str, Any]:
        line = asdict(self)
        if self.virtual_seconds is None:
            del line["virtual_seconds"]
        if not self.base_bytes:
            del line["base_bytes"]
        return line


@dataclass(frozen=True)
class RoundResult:
    """Outcome of a round."""

    round: int
    clients: list[ClientMetrics] = field(default_factory=list)  # of the updates that were used
    dropped: dict[int, str] = field(default_factory=dict)  # reasons of clients without a usable update
    rejected: list[int] = field(default_factory=list, compare=False)  # dropped clients that replied to this process
    late: list[int] = field(default_factory=list)  # clients with an unused update for an older plan
    state_metrics: dict[str, int] = field(default_factory=dict)  # of the states of simulated clients
    strategy_metrics: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)  # further values of ``metrics.jsonl``
    features: dict[str, Any] = field(default_factory=dict)  # by setting: what it guarantees and costs

    def drop(self, client: int, reason: str) -> None:
        self.dropped[client] = sanitize_line(reason, max_chars=500)

    def reject(self, client: int, reason: str) -> None:
        """Drop a client whose reply is not used."""
        self.rejected.append(client)
        self.drop(client, reason)

    def clients_by_reason(self) -> dict[str, str]:
        """Return the dropped clients, e.g. ``client 1, 5``, by reason: of diverged training all have the same."""
        clients: dict[str, list[int]] = {}
        for client, reason in self.dropped.items():
            clients.setdefault(reason, []).append(client)
        return {reason: f"client {shortened(ids, maximum=8)}" for reason, ids in clients.items()}

    def too_few(self, num_clients: int, *, needed: int) -> str | None:
        """Return that the updates are too few, and why; None if they are as many as needed."""
        used = len(self.clients)
        if used >= needed:
            return None
        reasons = "; ".join(f"{clients}: {reason}" for reason, clients in self.clients_by_reason().items())
        sent = f"{used or 'none'} of {num_clients} clients sent a usable update"
        needed_text = f" and aggregation.min_updates={needed} are needed" if used else ""
        return f"round {self.round}: {sent}{needed_text} ({reasons})"


@dataclass(frozen=True)
class ValidUpdate:
    """A validated update with its client's slot, cosines with its start, size in bytes, and staleness in rounds."""

    slot: ClientAssignment
    update: ClientUpdate
    cosines: Cosines
    bytes_up: int
    staleness: int = 0

    def metrics(self, round: int) -> ClientMetrics:
        slot, update, cosines = self.slot, self.update, self.cosines
        return ClientMetrics(
            round=round,
            client=slot.client,
            model=slot.start,
            loss=_finite(update.train_loss),  # NaN without a local epoch
            seconds=_finite(update.seconds),
            bytes_up=self.bytes_up,
            bytes_down=slot.bytes_down,
            examples=update.num_examples,
            cosine=cosines.weights,
            model_cosine=cosines.model if cosines.weights else None,
            layer_cosine=cosines.mean,
            staleness=self.staleness,
            base_bytes=slot.base_bytes,
        )


class CollectedUpdates:
    """Updates that are compared before any of them is used. Their layers are in a store for each starting model."""

    def __init__(
        self, storage: UpdateStorage, starts: Mapping[str, StartingModel], *, mods: Sequence[Mod] = ()
    ) -> None:
        self._storage, self._starts, self._mods = storage, starts, mods
        self._stores: dict[str, UpdateStore] = {}
        self._updates: dict[int, tuple[ValidUpdate, int]] = {}  # without layers, and their indices in the store
        self._measured: dict[int, list[Any]] = {}  # by each mod

    def add(self, valid: ValidUpdate) -> None:
        client, start = valid.slot.client, valid.slot.start
        if start not in self._stores:
            self._stores[start] = self._storage.new_store(self._starts[start].expected_upload)
        store = self._stores[start]
        store.add(valid.update.layers)
        self._measured[client] = [mod.measure(valid.update, valid.cosines, self._starts[start]) for mod in self._mods]
        self._updates[client] = replace(valid, update=replace(valid.update, layers={})), len(store) - 1

    def select(self) -> dict[int, str]:
        """Remove the updates that mods do not use, and return their clients with the reasons."""
        removed: dict[int, str] = {}
        for number, mod in enumerate(self._mods):
            removed |= mod.select({client: self._measured[client][number] for client in self._updates})
            self._updates = {client: one for client, one in self._updates.items() if client not in removed}
        return removed

    def assign(self, server: ServerStrategy) -> Mapping[int, str]:
        """Return the cluster of each client, by the changes of its layers."""
        clients: list[int] = []
        deltas: UpdateStore | None = None
        for valid in self:
            start = self._starts[valid.slot.start].expected_upload
            changes = start.changes(valid.update.layers)
            if deltas is None:
                deltas = self._storage.new_store(start.with_layers(changes))
            deltas.add(changes)
            clients.append(valid.slot.client)
        if deltas is None:
            return {}
        clusters = server.assign_clusters(clients, deltas)
        deltas.close()
        return clusters

    def __iter__(self) -> Iterator[ValidUpdate]:
        for valid, index in self._updates.values():
            layers = self._stores[valid.slot.start].layers(index)
            yield replace(valid, update=replace(valid.update, layers=layers))


class UpdateReader:
    """Reader of the replies of the round ``number``."""

    def __init__(
        self,
        federation: Federation,
        starts: Mapping[str, StartingModel],
        *,
        number: int,
        required_metrics: Collection[str],
        state_rounds: Mapping[int, int],
    ) -> None:
        self._federation, self._state_rounds = federation, state_rounds
        self.starts, self.number = starts, number
        self._expected: dict[tuple[str, tuple[Hashable, ...]], GlobalLayers] = {}
        self.validator = UpdateValidator(
            gathered=federation.context.gathered,
            required_metrics=tuple(required_metrics),
            code_fingerprint=code_fingerprint(),
            codec=federation.context.codec,
            max_examples=federation.settings.aggregation.max_examples,
        )

    def read(self, slot: ClientAssignment, reply: Message) -> ValidUpdate:
        """Return the update of a reply to this round's plan, and set its start; raises `InvalidUpdate`."""
        slot.start = slot.candidates[read_model_index(reply, num_models=len(slot.candidates))]
        return self.validate(slot, reply, self.starts[slot.start].expected_upload, number=self.number)

    def read_late(self, client: int, *, plan: Message, reply: Message) -> ValidUpdate:
        """Return the update of a reply to an earlier plan, applied to the current model; raises `InvalidUpdate`."""
        current, number = self.starts[GLOBAL].expected_upload, int(plan.metadata.group_id)
        start_layers = TrainPlan.from_content(plan.content).layers
        start = current.with_layers({name: start_layers[name] for name in current.layers})
        slot = ClientAssignment(client, (GLOBAL,), GLOBAL, tuple(start_layers), content_bytes(plan.content), (GLOBAL,))
        valid = self.validate(slot, reply, start, number=number)
        staleness = self.number - number
        layers = apply_stale_update(
            valid.update.layers, start=start.layers, current=current.layers, staleness=staleness
        )
        update = replace(valid.update, layers=layers)
        return replace(valid, update=update, cosines=current.cosines_of(layers), staleness=staleness)

    def validate(self, slot: ClientAssignment, reply: Message, expected: GlobalLayers, *, number: int) -> ValidUpdate:
        """Return the update of a reply to the plan of a round; raises `InvalidUpdate`."""
        update, cosines = self.validator.read(
            reply,
            client=slot.client,
            node=self._federation.nodes[slot.client],
            round=number,
            downloaded=slot.downloaded,
            expected=self._exchanged(expected, slot),
            saved_round=self._state_rounds.get(slot.client, 0),
            arrays=self.starts[slot.start].expected_arrays,
        )
        for mod, variant in zip(self._federation.mods, slot.variants, strict=False):  # none of a late reply
            update = mod.receive(update, variant, expected)
        return ValidUpdate(slot, update, cosines, content_bytes(reply.content))

    def _exchanged(self, expected: GlobalLayers, slot: ClientAssignment) -> GlobalLayers:
        """Return the layers as a client exchanges them, the same object for all clients of its variants."""
        if all(variant is None for variant in slot.variants):
            return expected
        key = (slot.start, slot.variants)
        if key not in self._expected:
            layers = exchanged_layers(self._federation.mods, expected.layers, slot.variants)
            self._expected[key] = expected.with_layers(layers)
        return self._expected[key]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
