"""Steps and bytes of every round of a run, without training.

The plans of all rounds are built by the run's own code, from the untrained model. The size of a plan or an update
depends on names, shapes and the number of a round, not on weights, so the bytes equal those of the run. Where they
depend on training they are upper bounds, see `why_upper_bound`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from flwr.app import RecordDict

from fedssl.arrays import Layers
from fedssl.availability import Always
from fedssl.schedule.phases import Phase, phase_at
from fedssl.training import number_of_batches
from fedssl.wire.messages import ARRAYS, CONFIG, METHOD_UPLOAD, ClientUpdate, TrainPlan
from fedssl.wire.records import content_bytes
from server_app.build import RunComponents
from server_app.plans import ClientAssignment
from server_app.round import Round
from server_app.round_context import RoundContext
from strategies.cluster_assignment import OneShotClusters, ServerAssignedClusters
from strategies.euc import EUCServer
from strategies.types import ServerState


@dataclass(frozen=True, kw_only=True)
class RoundCounts:
    """Counts of one round, of all of its clients."""

    phase: Phase
    clients: int
    images: int  # that the clients hold
    steps: int
    bytes_down: int
    bytes_up: int
    models: int  # of the server after the round
    evaluated: bool

    @property
    def bytes(self) -> int:
        """Return the bytes in both directions."""
        return self.bytes_down + self.bytes_up


def count_rounds(components: RunComponents, *, saves_state: bool) -> tuple[list[RoundCounts], int]:
    """Return the counts of all rounds, and the number of global models at the end.

    ``saves_state`` is whether a client has a state between rounds.
    """
    settings, context = components.settings, without_calibration(components.context)
    assert components.client_data is not None
    parts = components.client_data.parts
    state, sizes, result = ServerState(), _MessageSizes(context), []
    changes_models = _may_change_models(components)
    for number in range(1, settings.rounds + 1):
        attempted = Round(context, state, oldest_resumable=_oldest_checkpoint(components, before=number))
        bytes_down = bytes_up = 0
        images = {client: len(parts[client]) for client in attempted.slots}
        for message, (client, slot) in zip(attempted.messages, attempted.slots.items(), strict=True):
            expected = attempted.starts[slot.start].expected_upload.layers
            loaded = state.state_rounds.get(client, 0)
            saved = (loaded, number if saves_state else loaded)
            bytes_down += sizes.download(message.content, slot, expected)
            bytes_up += sizes.upload(
                message.content, expected, round=number, num_examples=images[client], state_rounds=saved
            )
        models = {**state.models, **{name: start.model for name, start in attempted.starts.items()}}
        result.append(
            RoundCounts(
                phase=phase_at(context.phases, number),
                clients=len(images),
                images=sum(images.values()),
                steps=sum(steps_of_client(components, size) for size in images.values()),
                bytes_down=bytes_down,
                bytes_up=bytes_up,
                models=len(models),
                evaluated=components.evaluator.due(number),
            )
        )
        # Without a last participation clients are assumed to hold no layer of the model.
        used = {} if changes_models else {client: (number, attempted.slots[client].start) for client in images}
        state = replace(
            state,
            round=number,
            models=models,
            last_participation={**state.last_participation, **used},
            state_rounds={**state.state_rounds, **dict.fromkeys(images, number if saves_state else 0)},
        )
    return result, len(state.models)


def _may_change_models(components: RunComponents) -> bool:
    """Return whether the server assigns clients to models by their updates, which decides what they have cached."""
    server = components.context.strategy.server
    assigns = isinstance(server, OneShotClusters | ServerAssignedClusters) and len(server.model_names) > 1
    return assigns and len(components.context.phases) > 1


def without_calibration(context: RoundContext) -> RoundContext:
    """Return the context with a calibration that changes nothing, if the run has one."""
    return context if context.calibration is None else replace(context, calibration=_NoCalibration())


def steps_of_client(components: RunComponents, num_images: int) -> int:
    """Return the training steps of a client with this many images in a round."""
    training, strategy = components.settings.training, components.context.strategy
    return _number_of_batches(components, num_images) * training.epochs * strategy.client.trainings_per_round


def batch_size(components: RunComponents, num_images: int) -> int:
    """Return the images in the largest batch of a client with this many images."""
    return -(-num_images // _number_of_batches(components, num_images))


def _number_of_batches(components: RunComponents, num_images: int) -> int:
    batch_size, smallest = components.settings.training.batch_size, components.method.min_batch_size
    return number_of_batches(num_images, batch_size, min_batch_size=smallest)


def images_of(components: RunComponents, of_clients: Callable[[Iterable[int]], float]) -> int:
    """Return the maximum or the median number of images of a client that trains."""
    data = components.client_data
    assert data is not None
    return int(of_clients(len(part) for client, part in enumerate(data.parts) if client not in data.few_images))


def why_upper_bound(components: RunComponents) -> list[str]:
    """Return the settings by which a run may send fewer bytes or take fewer rounds than counted."""
    settings, aggregation = components.settings, components.settings.aggregation
    skips_layers = _skips_layers(components.context)
    reasons = {
        f"availability={settings.recording.choices['availability']}": settings.availability.name != Always.__name__,
        "early_stopping": settings.evaluation.early_stopping.monitor is not None,
        "aggregation.buffered": aggregation.buffered,
        "aggregation.over_selection": aggregation.over_selection > 0,
        "aggregation.round_deadline": aggregation.round_deadline is not None,
        "aggregation.max_norm_ratio": aggregation.max_norm_ratio is not None,
        "aggregation.max_examples": aggregation.max_examples is not None,
        f"strategy={settings.recording.choices['strategy']}": skips_layers or _may_change_models(components),
    }
    return [name for name, holds in reasons.items() if holds]


def _skips_layers(context: RoundContext) -> bool:
    """Return whether the strategy exchanges fewer layers in some rounds, which depends on the updates."""
    server = context.strategy.server
    return isinstance(server, EUCServer) and server.interval > 1


class _MessageSizes:
    """Sizes of messages. The layers are encoded once for all clients that upload the same."""

    def __init__(self, context: RoundContext) -> None:
        self._gathered, self._names_uploads = context.gathered.layers, _skips_layers(context)
        self._name_bytes: int | None = None
        self._encoded: dict[tuple[str, ...], tuple[TrainPlan, RecordDict]] = {}
        self._sizes: dict[tuple[object, ...], int] = {}

    def download(self, content: RecordDict, slot: ClientAssignment, expected: Layers) -> int:
        """Return the bytes of a plan, and those of the names of all layers, which a plan has that skips some."""
        if not self._names_uploads:
            return slot.bytes_down
        if self._name_bytes is None:
            plan = replace(TrainPlan.from_content(content), layers={}, candidate_arrays=(), broadcast={})
            named = replace(plan, upload_names=tuple(expected))
            self._name_bytes = content_bytes(named.to_content()) - content_bytes(plan.to_content())
        return slot.bytes_down + self._name_bytes

    def upload(
        self, content: RecordDict, expected: Layers, *, round: int, num_examples: int, state_rounds: tuple[int, int]
    ) -> int:
        """Return the bytes of the update to a plan with this content."""
        key = (str(content.config_records[CONFIG]["metrics"]), *expected)
        numbers = (round, num_examples, *state_rounds)
        size_key = (key, *map(_encoded_length, numbers))
        if size_key not in self._sizes:
            self._sizes[size_key] = self._upload(key, content, expected, *numbers)
        return self._sizes[size_key]

    def _upload(
        self, key: tuple[str, ...], content: RecordDict, expected: Layers, round: int, num_examples: int, *states: int
    ) -> int:
        update = ClientUpdate(
            layers=expected,
            uploaded_parts=self._gathered,
            partition_id=0,
            num_examples=num_examples,
            train_loss=1.0,
            seconds=1.0,
            state_rounds=(states[0], states[1]),
        )
        if key not in self._encoded:
            plan = TrainPlan.from_content(content)
            self._encoded[key] = plan, update.to_content(plan)
        plan, encoded = self._encoded[key]
        metadata = replace(update, layers={}, uploaded_parts={}).to_content(replace(plan, round=round))
        arrays = {name: encoded.array_records[name] for name in (ARRAYS, METHOD_UPLOAD)}
        return content_bytes(RecordDict({**metadata, **arrays}))


def _encoded_length(number: int) -> int:
    """Return how many bytes after the first an integer has in Flower's records: 7 bits each, and one for the sign."""
    return number.bit_length() // 7


@dataclass
class _NoCalibration:
    """Calibration that is not computed, because it changes no size."""

    when: str = "end"

    def __call__(self, round: int, layers: Layers) -> Layers:
        return layers


def _oldest_checkpoint(components: RunComponents, *, before: int) -> int:
    """Return the round of the oldest checkpoint at the start of a round; 0 if there is none."""
    recording = components.settings.recording
    saved: Sequence[int] = range(recording.checkpoint_every, before, recording.checkpoint_every)
    return min(saved[-recording.keep_checkpoints :], default=0)
