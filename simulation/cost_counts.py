"""Steps and bytes of every round of a run, without training.

The plans of all rounds are built by the run's own code, from the untrained model. The size of a plan or an update
depends on names, shapes and the number of a round, not on weights, so the bytes equal those of the run. Exceptions are
listed by `why_upper_bound`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flwr.app import RecordDict

from fedssl.arrays import Layers
from fedssl.schedule.phases import Phase, phase_at
from fedssl.training import number_of_batches
from fedssl.wire.messages import ARRAYS, CONFIG, METHOD_UPLOAD, ClientUpdate, TrainPlan
from fedssl.wire.records import content_bytes
from server_app.build import RunComponents
from server_app.round import Round
from server_app.round_context import RoundContext
from strategies.euc import EUCServer
from strategies.interfaces import ServerState


@dataclass(frozen=True, kw_only=True)
class RoundCounts:
    """Counts of one round, of all of its clients."""

    phase: Phase
    clients: int
    images: int  # that the clients hold
    steps: int
    bytes_down: int
    bytes_up: int
    evaluated: bool

    @property
    def bytes(self) -> int:
        """Return the bytes in both directions."""
        return self.bytes_down + self.bytes_up


def count_rounds(components: RunComponents, *, saves_state: bool) -> tuple[list[RoundCounts], int]:
    """Return the counts of all rounds, and the number of global models at the end.

    ``saves_state`` is whether a client has a state between rounds.
    """
    assert components.client_data is not None
    settings, context, parts = components.settings, components.context, components.client_data.parts
    context = without_calibration(context)
    state, uploads, result = ServerState(), _Uploads(context.gathered.layers), []
    for number in range(1, settings.rounds + 1):
        attempted = Round(context, state, oldest_resumable=_oldest_checkpoint(components, before=number))
        sizes = [len(parts[slot.client]) for slot in attempted.slots.values()]
        bytes_up = 0
        for slot, message, size in zip(attempted.slots.values(), attempted.messages, sizes, strict=True):
            expected = attempted.starts[slot.start].expected_upload.layers
            loaded = state.state_rounds.get(slot.client, 0)
            saved = (loaded, number if saves_state else loaded)
            bytes_up += uploads.size(message.content, expected, round=number, num_examples=size, state_rounds=saved)
        participation = {slot.client: (number, slot.start) for slot in attempted.slots.values()}
        result.append(
            RoundCounts(
                phase=phase_at(context.phases, number),
                clients=len(sizes),
                images=sum(sizes),
                steps=sum(steps_of_client(components, size) for size in sizes),
                bytes_down=sum(slot.bytes_down for slot in attempted.slots.values()),
                bytes_up=bytes_up,
                evaluated=components.evaluator.due(number),
            )
        )
        state = replace(
            state,
            round=number,
            models={**state.models, **{name: start.model for name, start in attempted.starts.items()}},
            last_participation={**state.last_participation, **participation},
            state_rounds={**state.state_rounds, **dict.fromkeys(participation, number if saves_state else 0)},
        )
    return result, len(state.models)


def without_calibration(context: RoundContext) -> RoundContext:
    """Return the context with a calibration that changes nothing, if the run has one."""
    return context if context.calibration is None else replace(context, calibration=_NoCalibration())


def steps_of_client(components: RunComponents, num_images: int) -> int:
    """Return the training steps of a client with this many images in a round."""
    training, strategy = components.settings.training, components.context.strategy
    batches = number_of_batches(
        num_images, training.batch_size, min_batch_size=components.context.method.min_batch_size
    )
    return batches * training.epochs * strategy.client.trainings_per_round


def why_upper_bound(components: RunComponents) -> list[str]:
    """Return the settings by which a run may send fewer bytes or take fewer rounds than counted."""
    settings, server = components.settings, components.context.strategy.server
    reasons = {
        "early_stopping": settings.evaluation.early_stopping.monitor is not None,
        "aggregation.buffered": settings.aggregation.buffered,
        "aggregation.over_selection": settings.aggregation.over_selection > 0,
        "aggregation.round_deadline": settings.aggregation.round_deadline is not None,
        f"strategy={settings.recording.choices['strategy']}": isinstance(server, EUCServer)
        or bool(server.models_to_cluster(ServerState(), 1)),
    }
    return [name for name, holds in reasons.items() if holds]


class _Uploads:
    """Sizes of updates. The layers are encoded once for all clients that upload the same."""

    def __init__(self, gathered: Layers) -> None:
        self._gathered = gathered
        self._encoded: dict[tuple[str, ...], tuple[TrainPlan, RecordDict]] = {}

    def size(
        self, content: RecordDict, expected: Layers, *, round: int, num_examples: int, state_rounds: tuple[int, int]
    ) -> int:
        """Return the bytes of the update to a plan with this content."""
        update = ClientUpdate(
            layers=expected,
            uploaded_parts=self._gathered,
            partition_id=0,
            num_examples=num_examples,
            train_loss=1.0,
            seconds=1.0,
            state_rounds=state_rounds,
        )
        key = (str(content.config_records[CONFIG]["metrics"]), *expected)
        if key not in self._encoded:
            plan = TrainPlan.from_content(content)
            self._encoded[key] = plan, update.to_content(plan)
        plan, encoded = self._encoded[key]
        metadata = replace(update, layers={}, uploaded_parts={}).to_content(replace(plan, round=round))
        arrays = {name: encoded.array_records[name] for name in (ARRAYS, METHOD_UPLOAD)}
        return content_bytes(RecordDict({**metadata, **arrays}))


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
