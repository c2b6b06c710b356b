"""Updates of clients: read and validate them, filter outliers, and apply stale ones."""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Message

from fedssl.arrays import Cosines, Layers, ReferenceLayers
from fedssl.config.settings import LOSSLESS
from fedssl.errors import InputError
from fedssl.wire.messages import ARRAYS, NUM_EXAMPLES, SECONDS, TRAIN_LOSS, ClientUpdate, parse_model_index
from fedssl.wire.records import content_bytes, decode_arrays
from server_app.plans import ClientSlot, StartingModel
from server_app.round_context import RoundContext
from strategies.interfaces import GLOBAL

# Ranges of metrics. Losses of methods and regularizers are far smaller.
METRIC_RANGES = {TRAIN_LOSS: (-1e6, 1e6), SECONDS: (0.0, 1e7)}
PARTS = ("weights", "running statistics")


class InvalidUpdate(ValueError):
    """An update that cannot be used. The message is the reason."""


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


@dataclass(frozen=True)
class RoundResult:
    """Outcome of a round."""

    round: int
    clients: list[ClientMetrics] = field(default_factory=list)  # of the updates that were used
    dropped: dict[int, str] = field(default_factory=dict)  # reasons of clients without a usable update
    late: list[int] = field(default_factory=list)  # clients with an unused update for an older plan
    privacy: dict[str, float] = field(default_factory=dict)  # epsilon after this round, and its delta
    strategy_metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ValidUpdate:
    """A validated update with its client's slot, cosines with its start, size in bytes, and staleness in rounds."""

    slot: ClientSlot
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
        )


class UpdateReader:
    """Reader of the replies of the round ``number``."""

    def __init__(
        self,
        context: RoundContext,
        starts: Mapping[str, StartingModel],
        *,
        number: int,
        required_metrics: Collection[str],
        state_rounds: Mapping[int, int],
    ) -> None:
        self._context, self._starts, self._state_rounds = context, starts, state_rounds
        self._number, self._required_metrics = number, required_metrics

    def read(self, slot: ClientSlot, reply: Message) -> ValidUpdate:
        """Return the update of a reply to this round's plan, and set its start; raises `InvalidUpdate`."""
        slot.start = slot.candidates[read_model_index(reply, num_models=len(slot.candidates))]
        return self._validate(slot, reply, self._starts[slot.start].expected_upload, number=self._number)

    def read_late(self, client: int, plan: Message, reply: Message) -> ValidUpdate:
        """Return the update of a reply to an earlier plan, applied to the current model; raises `InvalidUpdate`."""
        current, number = self._starts[GLOBAL].expected_upload, int(plan.metadata.group_id)
        start_layers = decode_arrays(plan.content.array_records[ARRAYS], self._context.wire_dtype)
        start = ReferenceLayers({name: start_layers[name] for name in current.layers})
        slot = ClientSlot(client, (GLOBAL,), GLOBAL, tuple(start_layers), content_bytes(plan.content), (GLOBAL,))
        valid = self._validate(slot, reply, start, number=number)
        staleness = self._number - number
        layers = apply_stale_update(
            valid.update.layers, start=start.layers, current=current.layers, staleness=staleness
        )
        update = replace(valid.update, layers=layers)
        return replace(valid, update=update, cosines=current.cosines_of(layers), staleness=staleness)

    def _validate(self, slot: ClientSlot, reply: Message, expected: ReferenceLayers, *, number: int) -> ValidUpdate:
        context = self._context
        # A shortened layer contains the change by training. Added to the server's own copy of the model, it is not
        # affected by the rounding of the download, and neither is its cosine.
        downloaded = {layer: expected.layers[layer] for layer in slot.downloaded if layer in expected.layers}
        update = read_update(
            reply, slot.client, sent_to=context.nodes[slot.client], wire_dtype=context.wire_dtype, start=downloaded
        )
        check_state_round(update, self._state_rounds)
        cosines = check_update(
            update,
            expected=expected,
            gathered=context.gathered,
            required_metrics=self._required_metrics,
            plan=(number, context.code_fingerprint),
            max_examples=context.aggregation.max_examples,
        )
        return ValidUpdate(slot, update, cosines, content_bytes(reply.content))


def read_model_index(reply: Message, *, num_models: int) -> int:
    """Return the index of the model that the client started from; raises `InvalidUpdate`."""
    with _read_errors_as_invalid_update():
        return parse_model_index(reply.content, num_models=num_models)


def read_update(
    reply: Message, client: int, *, sent_to: int, wire_dtype: str = LOSSLESS, start: Layers | None = None
) -> ClientUpdate:
    """Return the update in a client's reply to the message for node ``sent_to``; raises `InvalidUpdate`.

    ``wire_dtype`` and ``start`` as in `fedssl.wire.messages.ClientUpdate.from_content`.
    """
    if reply.metadata.src_node_id != sent_to:
        raise InvalidUpdate(f"node {reply.metadata.src_node_id} replied to what was sent to node {sent_to}")
    with _read_errors_as_invalid_update():
        return ClientUpdate.from_content(reply.content, client, wire_dtype=wire_dtype, start=start)


@contextmanager
def _read_errors_as_invalid_update() -> Iterator[None]:
    try:
        yield
    except KeyError as missing:
        raise InvalidUpdate(f"record {missing} is missing") from missing
    except Exception as error:  # whatever a peer may have put into a message
        raise InvalidUpdate(f"the update cannot be read ({type(error).__name__}: {error})") from error


def check_state_round(update: ClientUpdate, state_rounds: Mapping[int, int]) -> None:
    """Raise `InvalidUpdate` if the client has lost the state that it saved after the round in ``state_rounds``."""
    saved = state_rounds.get(update.partition_id, 0)
    if update.state_rounds[0] < saved:
        raise InvalidUpdate(f"it has lost the state that it saved in round {saved}")


def check_update(
    update: ClientUpdate,
    *,
    expected: ReferenceLayers,
    gathered: ReferenceLayers,
    required_metrics: Collection[str],
    plan: tuple[int, str],
    max_examples: int | None = None,
) -> Cosines:
    """Validate an update and return its cosines with the model that its client started from.

    Parameters
    ----------
    expected : ReferenceLayers
        The layers to send, as the client received them.
    gathered : ReferenceLayers
        The parts for the method's server side, to compare names, shapes and dtypes.
    plan : tuple of int and str
        Round and code fingerprint of the plan.

    Raises
    ------
    InvalidUpdate
        The message is the reason.
    """
    for what, answered, sent_out in zip(("round", "code"), update.plan_id or (None, None), plan, strict=True):
        if answered != sent_out:
            raise InvalidUpdate(f"it answers {what} {answered} instead of {what} {sent_out}")
    try:
        expected.check(update.layers)
        gathered.check(update.uploaded_parts)
    except InputError as problem:
        raise InvalidUpdate(str(problem)) from problem
    _check_metrics(update, required_metrics, max_examples=max_examples)
    cosines = expected.cosines_of(update.layers)
    for offender in (cosines.first_invalid, gathered.cosines_of(update.uploaded_parts).first_invalid):
        if offender is not None:
            raise InvalidUpdate(f"layer {offender} has values that are not finite, or far too large")
    for name, array in update.layers.items():
        if name.endswith("running_var") and array.size and array.min() < 0:
            raise InvalidUpdate(f"layer {name} has a negative variance")
    return cosines


def _check_metrics(update: ClientUpdate, required_metrics: Collection[str], *, max_examples: int | None) -> None:
    for name, value in ((NUM_EXAMPLES, update.num_examples), (TRAIN_LOSS, update.train_loss)):
        if name in required_metrics and value is None:
            raise InvalidUpdate(f"metric {name} is missing")
    if update.num_examples is not None and update.num_examples <= 0:
        raise InvalidUpdate(f"{NUM_EXAMPLES}={update.num_examples} is not positive")
    if max_examples is not None and (update.num_examples or 0) > max_examples:
        raise InvalidUpdate(
            f"{NUM_EXAMPLES}={update.num_examples} is more than aggregation.max_examples={max_examples}"
        )
    for name, value in ((TRAIN_LOSS, update.train_loss), (SECONDS, update.seconds)):
        low, high = METRIC_RANGES[name]
        if value is not None and math.isfinite(value) and not low <= value <= high:
            raise InvalidUpdate(f"{name}={value} is not from {low:g} to {high:g}")
    if TRAIN_LOSS in required_metrics and not math.isfinite(update.train_loss or 0.0):
        raise InvalidUpdate(f"{TRAIN_LOSS}={update.train_loss} is not finite")


def norm_outliers(norms_of: Mapping[int, tuple[float, float]], *, factor: float) -> dict[int, str]:
    """Return the clients whose update norm is more than ``factor`` times the median of the round, with the reason.

    More than half of the clients must be honest. With fewer than three clients there are no outliers. ``norms_of`` has
    the relative change of weights and running statistics by client, see `fedssl.arrays.Cosines`.
    """
    outliers: dict[int, str] = {}
    for what, norms in zip(PARTS, zip(*norms_of.values(), strict=True), strict=False):
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
    server learning rate of 1. Integer counters are returned unchanged.
    """
    weight = 1 / math.sqrt(1 + staleness)
    return {
        name: current[name] + (array - start[name]) * array.dtype.type(weight) if array.dtype.kind == "f" else array
        for name, array in layers.items()
    }


def _finite(value: float | None) -> float | None:
    """Return None instead of a value that JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
