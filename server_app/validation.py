"""Validation of a client's update: names, shapes, dtypes, finite values, ranges of metrics, and the plan it answers."""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from flwr.app import Message

from fedssl.arrays import VARIANCE, Cosines, GlobalLayers, Layers
from fedssl.errors import InputError
from fedssl.wire.messages import NUM_EXAMPLES, SECONDS, TRAIN_LOSS, ClientUpdate, parse_model_index
from fedssl.wire.records import EXACT, Codec

# Ranges of metrics. Losses of methods and regularizers are far smaller.
METRIC_RANGES = {TRAIN_LOSS: (-1e6, 1e6), SECONDS: (0.0, 1e7)}

MAX_COUNT = 2**53  # of integer layers

NO_ARRAYS = GlobalLayers({})


class InvalidUpdate(ValueError):
    """An update that cannot be used. The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class UpdateValidator:
    """Validator of the replies of a round. Picklable."""

    gathered: GlobalLayers  # names, shapes and dtypes of the parts for the method's server side
    required_metrics: tuple[str, ...]
    code_fingerprint: str
    codec: Codec
    max_examples: int | None

    def read(
        self,
        reply: Message,
        *,
        client: int,
        node: int,
        round: int,
        downloaded: Collection[str],
        expected: GlobalLayers,
        saved_round: int,
        arrays: GlobalLayers = NO_ARRAYS,
    ) -> tuple[ClientUpdate, Cosines]:
        """Return the update in a reply to a plan of ``round``, and its cosines; raises `InvalidUpdate`.

        ``downloaded`` are the names of the trained layers that the client received, ``expected`` the layers to send,
        ``arrays`` those for the strategy's server side, and ``saved_round`` is the round after which the client saved
        its newest state, or 0.
        """
        # A shortened layer contains the change by training. Added to the server's own copy of the model, it is not
        # affected by the rounding of the download, and neither is its cosine.
        start = {layer: expected.layers[layer] for layer in downloaded if layer in expected.layers}
        update = read_update(reply, client, sent_to=node, codec=self.codec, start=start)
        cosines = self.check(update, round=round, expected=expected, arrays=arrays)
        check_state_rounds(update, round=round, saved_round=saved_round)
        return update, cosines

    def check(
        self, update: ClientUpdate, *, round: int, expected: GlobalLayers, arrays: GlobalLayers = NO_ARRAYS
    ) -> Cosines:
        """Return the cosines of an update with the model that its client started from; raises `InvalidUpdate`."""
        plan = round, self.code_fingerprint
        for what, answered, sent_out in zip(("round", "code"), update.plan_id or (None, None), plan, strict=True):
            if answered != sent_out:
                raise InvalidUpdate(f"it answers {what} {answered} instead of {what} {sent_out}")
        try:
            expected.check(update.layers)
            self.gathered.check(update.uploaded_parts)
            arrays.check(update.strategy_arrays)
        except InputError as problem:
            raise InvalidUpdate(str(problem)) from problem
        self._check_metrics(update)
        cosines = expected.cosines_of(update.layers)
        others = ((self.gathered, update.uploaded_parts), (arrays, update.strategy_arrays))
        invalid = (like.cosines_of(given).first_invalid for like, given in others if given)
        for offender in (cosines.first_invalid, *invalid):
            if offender is not None:
                raise InvalidUpdate(f"layer {offender} has values that are not finite, or far too large")
        for name, array in update.layers.items():
            if name.endswith(VARIANCE) and array.size and array.min() < 0:
                raise InvalidUpdate(f"layer {name} has a negative variance")
            is_wide = (
                array.dtype.kind in "iu" and array.size and not -MAX_COUNT <= array.min() <= array.max() <= MAX_COUNT
            )
            if is_wide and not np.array_equal(array, expected.layers[name]):  # a constant may have any
                raise InvalidUpdate(f"layer {name} has integers beyond {MAX_COUNT}, of which no mean is exact")
        return cosines

    def _check_metrics(self, update: ClientUpdate) -> None:
        for name, value in ((NUM_EXAMPLES, update.num_examples), (TRAIN_LOSS, update.train_loss)):
            if name in self.required_metrics and value is None:
                raise InvalidUpdate(f"metric {name} is missing")
        if update.num_examples is not None and update.num_examples <= 0:
            raise InvalidUpdate(f"{NUM_EXAMPLES}={update.num_examples} is not positive")
        if self.max_examples is not None and (update.num_examples or 0) > self.max_examples:
            raise InvalidUpdate(
                f"{NUM_EXAMPLES}={update.num_examples} is more than aggregation.max_examples={self.max_examples}"
            )
        for name, value in ((TRAIN_LOSS, update.train_loss), (SECONDS, update.seconds)):
            low, high = METRIC_RANGES[name]
            if value is not None and math.isfinite(value) and not low <= value <= high:
                raise InvalidUpdate(f"{name}={value} is not from {low:g} to {high:g}")
        if TRAIN_LOSS in self.required_metrics and not math.isfinite(update.train_loss or 0.0):
            raise InvalidUpdate(f"{TRAIN_LOSS}={update.train_loss} is not finite")


def read_model_index(reply: Message, *, num_models: int) -> int:
    """Return the index of the model that the client started from; raises `InvalidUpdate`."""
    with _read_errors_as_invalid_update():
        return parse_model_index(reply.content, num_models=num_models)


def read_update(
    reply: Message, client: int, *, sent_to: int, codec: Codec = EXACT, start: Layers | None = None
) -> ClientUpdate:
    """Return the update in a client's reply to the message for node ``sent_to``; raises `InvalidUpdate`.

    ``codec`` and ``start`` as in `fedssl.wire.messages.ClientUpdate.from_content`.
    """
    if reply.metadata.src_node_id != sent_to:
        raise InvalidUpdate(f"node {reply.metadata.src_node_id} replied to what was sent to node {sent_to}")
    with _read_errors_as_invalid_update():
        return ClientUpdate.from_content(reply.content, client, codec, start=start)


@contextmanager
def _read_errors_as_invalid_update() -> Iterator[None]:
    try:
        yield
    except KeyError as missing:
        raise InvalidUpdate(f"record {missing} is missing") from missing
    except Exception as error:  # whatever a peer may have put into a message
        raise InvalidUpdate(f"the update cannot be read ({type(error).__name__}: {error})") from error


def check_state_rounds(update: ClientUpdate, *, round: int, saved_round: int) -> None:
    """Raise `InvalidUpdate` if no client has such states in ``round``, or if it has lost that of ``saved_round``.

    A client loads a state of an earlier round, or none. It saves one after ``round``, or keeps what it loaded.
    """
    loaded, saved = update.state_rounds
    if loaded < saved_round:
        raise InvalidUpdate(f"it has lost the state that it saved in round {saved_round}")
    if loaded >= round or saved not in (loaded, round):
        raise InvalidUpdate(f"it loaded a state of round {loaded} and has one of round {saved} after round {round}")
