"""Read, validate, filter and correct the updates of clients."""

import logging
import math
import statistics
from collections.abc import Collection, Mapping

from flwr.app import Message

from fedssl.arrays import Cosines, Layers, ReferenceLayers
from fedssl.config.settings import LOSSLESS
from fedssl.errors import InputError
from fedssl.wire.messages import NUM_EXAMPLES, SECONDS, TRAIN_LOSS, ClientUpdate, parse_model_index

log = logging.getLogger("fedssl")

# What a metric may be; beyond it a client lies. Losses of methods and their regularisers are far smaller.
METRIC_RANGES = {TRAIN_LOSS: (-1e6, 1e6), SECONDS: (0.0, 1e7)}

PARTS = ("weights", "running statistics")


class InvalidUpdate(ValueError):
    """An update that cannot be used; the message is the reason, for the log."""


def read_model_index(reply: Message, *, among: int) -> int:
    """Which of so many models the client says that it started from; raises `InvalidUpdate`."""
    try:
        return parse_model_index(reply.content, among=among)
    except KeyError as missing:
        raise InvalidUpdate(f"record {missing} is missing") from missing
    except Exception as error:  # whatever a peer may have put into a message
        raise InvalidUpdate(f"the update cannot be read ({type(error).__name__}: {error})") from error


def read_update(
    reply: Message, client: int, *, sent_to: int, wire_dtype: str = LOSSLESS, start: Layers | None = None
) -> ClientUpdate:
    """The update in the reply of a client to what was sent to its node; raises `InvalidUpdate`.

    ``wire_dtype`` and ``start`` as in `fedssl.wire.messages.ClientUpdate.from_content`.
    """
    if reply.metadata.src_node_id != sent_to:
        raise InvalidUpdate(f"node {reply.metadata.src_node_id} replied to what was sent to node {sent_to}")
    try:
        return ClientUpdate.from_content(reply.content, client, wire_dtype=wire_dtype, start=start)
    except KeyError as missing:
        raise InvalidUpdate(f"record {missing} is missing") from missing
    except Exception as error:  # whatever a peer may have put into a message
        raise InvalidUpdate(f"the update cannot be read ({type(error).__name__}: {error})") from error


def check_update(
    update: ClientUpdate,
    *,
    expected: ReferenceLayers,
    gathered: ReferenceLayers,
    required_metrics: Collection[str],
    plan: tuple[int, str],
    max_examples: int | None = None,
) -> Cosines:
    """The cosines of an update with what its client started from.

    Parameters
    ----------
    expected : ReferenceLayers
        The layers that the client was to send, as it had received them.
    gathered : ReferenceLayers
        What its part for the method's server side must be like.
    required_metrics : collection of str
        Metrics that it must have.
    plan : tuple of int and str
        Round and code of the plan that it must answer.
    max_examples : int, optional
        More images no client can have.

    Raises
    ------
    InvalidUpdate
        It answers another plan, a layer is missing, of another form or not finite, or a metric is missing or
        impossible.
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
    """Clients whose update is not plausible, with the reason.

    More than half of the clients must be honest, and with fewer than three nobody stands out.

    Parameters
    ----------
    norms_of : mapping of int to (float, float)
        How far a client moved, see `fedssl.arrays.Cosines`.
    factor : float
        How many times the median of the round is still plausible.
    """
    outliers: dict[int, str] = {}
    for what, norms in zip(PARTS, zip(*norms_of.values(), strict=True), strict=False):
        median = statistics.median(norms)
        for client, norm in zip(norms_of, norms, strict=True):
            if norm > factor * median:
                outliers.setdefault(
                    client,
                    f"its {what} moved {norm / median:.3g} times as far as the median of the round, of which "
                    f"{factor:g} times are plausible (aggregation.max_norm_ratio)",
                )
    return outliers


def apply_stale_update(layers: Layers, *, start: Layers, current: Layers, staleness: int) -> Layers:
    """What an update of ``staleness`` rounds ago is for the present model: the way that it went, shorter, from there.

    ``current + (layers - start) / sqrt(1 + staleness)`` with the weight for staleness of FedBuff (Section 5.1, s(tau) =
    (1 + tau)^-0.5); the mean over clients is then its update of the server (Algorithm 1) with a server learning rate of
    1. Counters, which are no floating-point numbers, stay as they came.
    """
    weight = 1 / math.sqrt(1 + staleness)
    return {
        name: current[name] + (array - start[name]) * array.dtype.type(weight) if array.dtype.kind == "f" else array
        for name, array in layers.items()
    }
