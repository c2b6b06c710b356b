"""Updates of clients: read them, filter outliers, and apply stale ones."""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Message

from fedssl.arrays import Cosines, GlobalLayers, Layers, is_weight, relative_norm
from fedssl.low_rank_products import pad_factors
from fedssl.wire.fingerprint import code_fingerprint
from fedssl.wire.messages import ARRAYS, ClientUpdate
from fedssl.wire.records import content_bytes, decode_arrays
from server_app.exchanges.sums import RemoteSum, SummedContent
from server_app.federation import Federation
from server_app.plans import ClientAssignment, StartingModel
from server_app.validation import UpdateValidator, read_model_index
from strategies.types import GLOBAL
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
    privacy: dict[str, float] = field(default_factory=dict)  # epsilon after this round, and its delta
    # Guarantees and costs of secure aggregation, see `server_app.secure_aggregation.privacy_parameters`.
    secure_aggregation: dict[str, Any] = field(default_factory=dict)
    strategy_metrics: dict[str, Any] = field(default_factory=dict)
    # Duration of the round in virtual seconds, failed attempts and waiting included, and the time at its end; None in
    # wall-clock time.
    virtual_seconds: float | None = None
    virtual_time: float | None = None


@dataclass(frozen=True)
class ValidUpdate:
    """A validated update with its client's slot, cosines with its start, size in bytes, and staleness in rounds.

    With ``remote_sum`` its layers are part of this sum, and ``update`` has none.
    """

    slot: ClientAssignment
    update: ClientUpdate
    cosines: Cosines
    bytes_up: int
    staleness: int = 0
    remote_sum: RemoteSum | None = None

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
        self._federation, self._starts, self._state_rounds = federation, starts, state_rounds
        self._number = number
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
        if isinstance(reply.content, SummedContent):
            summed, remote_sum = reply.content.summed, reply.content.remote_sum
            return ValidUpdate(slot, summed.update, summed.cosines, summed.num_bytes, remote_sum=remote_sum)
        slot.start = slot.candidates[read_model_index(reply, num_models=len(slot.candidates))]
        return self._validate(slot, reply, self._starts[slot.start].expected_upload, number=self._number)

    def read_late(self, client: int, plan: Message, reply: Message) -> ValidUpdate:
        """Return the update of a reply to an earlier plan, applied to the current model; raises `InvalidUpdate`."""
        current, number = self._starts[GLOBAL].expected_upload, int(plan.metadata.group_id)
        start_layers = decode_arrays(plan.content.array_records[ARRAYS], self._federation.settings.wire_dtype)
        start = current.with_layers({name: start_layers[name] for name in current.layers})
        slot = ClientAssignment(client, (GLOBAL,), GLOBAL, tuple(start_layers), content_bytes(plan.content), (GLOBAL,))
        valid = self._validate(slot, reply, start, number=number)
        staleness = self._number - number
        layers = apply_stale_update(
            valid.update.layers, start=start.layers, current=current.layers, staleness=staleness
        )
        update = replace(valid.update, layers=layers)
        return replace(valid, update=update, cosines=current.cosines_of(layers), staleness=staleness)

    def _validate(self, slot: ClientAssignment, reply: Message, expected: GlobalLayers, *, number: int) -> ValidUpdate:
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


def apply_stale_update(layers: Layers, *, start: Layers, current: Layers, staleness: int) -> Layers:
    """Apply an update of ``staleness`` rounds ago to the current model.

    ``current + (layers - start) / sqrt(1 + staleness)`` (buffered aggregation, Nguyen et al., AISTATS 2022, "FedBuff",
    Section 5.1, s(tau) = (1 + tau)^-0.5). The mean over clients is then FedBuff's server update (Algorithm 1) with a
    server learning rate of 1. Running statistics, which FedBuff does not cover, move towards the client's: ``current +
    (layers - current) / sqrt(1 + staleness)``, because a difference can make a variance negative. Integer counters are
    returned unchanged.
    """
    weight = 1 / math.sqrt(1 + staleness)
    updated: Layers = {}
    for name, array in layers.items():
        origin = start[name] if is_weight(name, array) else current[name]
        updated[name] = array
        if array.dtype.kind == "f":
            updated[name] = current[name] + (array - origin) * array.dtype.type(weight)
    return updated


def _finite(value: float | None) -> float | None:
    """Return None instead of a value that JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
