"""Updates of clients: read them, filter outliers, and apply stale ones."""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Message

from fedssl.arrays import Cosines, GlobalLayers, Layers, relative_norm
from fedssl.low_rank_products import FactorPairs, pad_factors
from fedssl.safe_io import sanitize_line
from fedssl.wire.fingerprint import code_fingerprint
from fedssl.wire.messages import ClientUpdate
from fedssl.wire.records import content_bytes
from server_app.federation import Federation
from server_app.validation import UpdateValidator, read_model_index
from strategies.base import ServerStrategy
from strategies.round_start import ClientAssignment, StartingModel
from strategies.update_store import UpdateStorage, UpdateStore

UPDATE_PARTS = ("weights", "running statistics", "low-rank factors")


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
        """Return the line of ``clients.jsonl``."""
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
    late: list[int] = field(default_factory=list)  # clients with an unused update for an older plan
    state_metrics: dict[str, int] = field(default_factory=dict)  # of the states of simulated clients
    strategy_metrics: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)  # further values of ``metrics.jsonl``
    features: dict[str, Any] = field(default_factory=dict)  # by setting: what it guarantees and costs

    def drop(self, client: int, reason: str) -> None:
        """Add a client without a usable update."""
        self.dropped[client] = sanitize_line(reason, max_chars=500)

    def clients_by_reason(self) -> dict[str, str]:
        """Return the dropped clients, e.g. ``client 1, 5``, by reason: of diverged training all have the same."""
        clients: dict[str, list[str]] = {}
        for client, reason in self.dropped.items():
            clients.setdefault(reason, []).append(str(client))
        return {reason: f"client {', '.join(ids)}" for reason, ids in clients.items()}

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
    """Updates that are compared before any of them is used. Their layers are in a store for each starting model.

    With ``compares_factors`` LoRA's factors are compared besides their products.
    """

    def __init__(
        self, storage: UpdateStorage, starts: Mapping[str, StartingModel], *, compares_factors: bool = False
    ) -> None:
        self._storage, self._starts, self._compares_factors = storage, starts, compares_factors
        self._stores: dict[str, UpdateStore] = {}
        self._updates: dict[int, tuple[ValidUpdate, int]] = {}  # without layers, and their indices in the store
        self._norms: dict[int, tuple[float, ...]] = {}

    def add(self, valid: ValidUpdate) -> None:
        """Add an update."""
        start = valid.slot.start
        if start not in self._stores:
            self._stores[start] = self._storage.new_store(self._starts[start].expected_upload.layers)
        store = self._stores[start]
        store.add(valid.update.layers)
        self._norms[valid.slot.client] = valid.cosines.relative_change
        if self._compares_factors:
            change = factor_change(self._starts[start].expected_upload, valid.update.layers)
            self._norms[valid.slot.client] += (change,)
        self._updates[valid.slot.client] = replace(valid, update=replace(valid.update, layers={})), len(store) - 1

    def norms(self) -> dict[int, tuple[float, ...]]:
        """Return the relative change of each of `UPDATE_PARTS` by client; that of factors only if they are compared."""
        return {client: self._norms[client] for client in self._updates}

    def remove(self, client: int) -> None:
        """Remove the update of a client."""
        del self._updates[client]

    def deltas(self) -> Iterator[tuple[int, Layers]]:
        """Yield each client with the change of its layers; see `layer_changes`."""
        for valid in self:
            yield valid.slot.client, layer_changes(self._starts[valid.slot.start].expected_upload, valid.update.layers)

    def assign(self, server: ServerStrategy, factor_pairs: FactorPairs) -> Mapping[int, str]:
        """Return the cluster of each client, by the changes of its layers."""
        clients: list[int] = []
        deltas: UpdateStore | None = None
        for client, delta in self.deltas():
            if deltas is None:
                deltas = self._storage.new_store(delta, factor_pairs)
            deltas.add(delta)
            clients.append(client)
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
        self.starts, self.number, self.wire_dtype = starts, number, federation.settings.wire_dtype
        self._ranked: dict[tuple[str, int], GlobalLayers] = {}
        self.validator = UpdateValidator(
            gathered=federation.context.gathered,
            required_metrics=tuple(required_metrics),
            code_fingerprint=code_fingerprint(),
            wire_dtype=federation.settings.wire_dtype,
            max_examples=federation.settings.aggregation.max_examples,
        )

    def read(self, slot: ClientAssignment, reply: Message) -> ValidUpdate:
        """Return the update of a reply to this round's plan, and set its start; raises `InvalidUpdate`."""
        slot.start = slot.candidates[read_model_index(reply, num_models=len(slot.candidates))]
        return self.validate(slot, reply, self.starts[slot.start].expected_upload, number=self.number)

    def validate(self, slot: ClientAssignment, reply: Message, expected: GlobalLayers, *, number: int) -> ValidUpdate:
        """Return the update of a reply to the plan of a round; raises `InvalidUpdate`."""
        update, cosines = self.validator.read(
            reply,
            client=slot.client,
            node=self._federation.nodes[slot.client],
            round=number,
            downloaded=slot.downloaded,
            expected=self._with_rank(expected, slot),
            saved_round=self._state_rounds.get(slot.client, 0),
        )
        if slot.rank is not None:
            shapes = {name: array.shape for name, array in expected.layers.items()}
            layers = pad_factors(update.layers, self._federation.context.factor_pairs.layers, shapes)
            update = replace(update, layers=layers)
        return ValidUpdate(slot, update, cosines, content_bytes(reply.content))

    def _with_rank(self, expected: GlobalLayers, slot: ClientAssignment) -> GlobalLayers:
        """Return the layers as a client of its rank received them, the same object for all clients of the rank."""
        if slot.rank is None:
            return expected
        key = (slot.start, slot.rank)
        if key not in self._ranked:
            self._ranked[key] = expected.with_layers(self._federation.with_rank(expected.layers, slot.rank))
        return self._ranked[key]


def layer_changes(start: GlobalLayers, layers: Layers) -> Layers:
    """Return the changes of a client's layers. Factors of a product become those of its change, of twice the rank.

    A product whose factor A is fixed changes by the product of that factor and the change of B.
    """
    changes = {name: layers[name] - array for name, array in start.layers.items()}
    for b, pair in start.products.items():
        if pair.a in start.first_factors:  # (B_k - B) A_k + B (A_k - A)
            changes[b] = np.hstack((changes[b], start.layers[b]))
            changes[pair.a] = np.vstack((layers[pair.a], changes[pair.a]))
    return changes


def factor_change(start: GlobalLayers, layers: Layers) -> float:
    """Return the distance of LoRA's factors from their initial values, as one vector, as `Cosines.relative_change`.

    A product is small if one of its factors is, however large the other one. The mean of such factors is not.
    """
    names = {*start.products, *start.first_factors}
    initial = {name: start.layers[name].astype(np.float64) for name in sorted(names)}
    change = sum(float(np.square(layers[name] - array).sum()) for name, array in initial.items())
    return relative_norm(change, sum(float(np.square(array).sum()) for array in initial.values()))


def norm_outliers(norms_of: Mapping[int, tuple[float, ...]], *, factor: float) -> dict[int, str]:
    """Return the clients whose update norm is more than ``factor`` times the median of the round, with the reason.

    More than half of the clients must be honest. With fewer than three clients there are no outliers. ``norms_of`` has
    the relative changes by client, see `CollectedUpdates.norms`.
    """
    outliers: dict[int, str] = {}
    for what, norms in zip(UPDATE_PARTS, zip(*norms_of.values(), strict=True), strict=False):
        median = statistics.median(norms)
        for client, norm in zip(norms_of, norms, strict=True):
            if norm > factor * median:
                reason = (
                    f"its {what} moved {norm / median:.3g} times as far as the median of the round, of which "
                    f"{factor:g} times are plausible (aggregation.max_norm_ratio)"
                )
                outliers.setdefault(client, reason)
    return outliers


def _finite(value: float | None) -> float | None:
    """Return None instead of a value that JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
