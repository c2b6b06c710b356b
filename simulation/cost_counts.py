"""Steps and bytes of every round of a run, without training.

The plans of all rounds are built by the run's own code, from the untrained model. The size of a plan or an update
depends on names, shapes and the number of a round, not on weights, so the bytes equal those of a run in which every
client replies in every round.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from flwr.app import RecordDict

from fedssl.arrays import Layers
from fedssl.training import number_of_batches
from fedssl.wire.messages import ClientUpdate, TrainPlan
from fedssl.wire.records import content_bytes
from server_app.build import RunComponents
from server_app.round import Round
from strategies.types import ServerState


@dataclass(frozen=True, kw_only=True)
class RoundCounts:
    """Counts of one round, of all of its clients."""

    clients: int
    steps: int
    bytes_down: int
    bytes_up: int
    models: int  # of the server after the round


def count_rounds(components: RunComponents, *, saves_state: bool) -> list[RoundCounts]:
    """Return the counts of all rounds. ``saves_state`` is whether a client has a state between rounds.

    A calibration trains in every round, unless its epochs are 0.
    """
    assert components.client_data is not None
    parts, gathered, state = components.client_data.parts, components.context.gathered.layers, ServerState()
    result, sizes = [], dict[Hashable, int]()
    for number in range(1, components.settings.rounds + 1):
        attempted = Round(components.federation, state, oldest_resumable=_oldest_checkpoint(components, before=number))
        images = {client: len(parts[client]) for client in attempted.slots}
        bytes_up = 0
        for message, (client, slot) in zip(attempted.messages, attempted.slots.items(), strict=True):
            loaded = state.state_rounds.get(client, 0)
            states = (loaded, number if saves_state else loaded)
            layers = attempted.starts[slot.start].expected_upload.layers
            # An integer has 7 bits in a byte of Flower's records, and one for the sign.
            lengths = (value.bit_length() // 7 for value in (number, images[client], *states))
            key = (*layers, *lengths)
            if key not in sizes:
                sizes[key] = _upload_bytes(message.content, layers, gathered, examples=images[client], states=states)
            bytes_up += sizes[key]
        models = {**state.models, **{name: start.model for name, start in attempted.starts.items()}}
        result.append(
            RoundCounts(
                clients=len(images),
                steps=sum(steps_of_client(components, size) for size in images.values()),
                bytes_down=sum(slot.bytes_down for slot in attempted.slots.values()),
                bytes_up=bytes_up,
                models=len(models),
            )
        )
        used = {client: (number, attempted.slots[client].start) for client in images}
        state = replace(
            state,
            round=number,
            models=models,
            last_participation={**state.last_participation, **used},
            state_rounds={**state.state_rounds, **dict.fromkeys(images, number if saves_state else 0)},
        )
    return result


def steps_of_client(components: RunComponents, num_images: int) -> int:
    """Return the training steps of a client with this many images in a round."""
    training, strategy = components.settings.training, components.federation.strategy
    return _number_of_batches(components, num_images) * training.epochs * strategy.client.trainings_per_round


def batch_size(components: RunComponents, num_images: int) -> int:
    """Return the images in the largest batch of a client with this many images."""
    return -(-num_images // _number_of_batches(components, num_images))


def _number_of_batches(components: RunComponents, num_images: int) -> int:
    batch_size, smallest = components.settings.training.batch_size, components.method.min_batch_size
    return number_of_batches(num_images, batch_size, min_batch_size=smallest)


def _upload_bytes(plan: RecordDict, layers: Layers, gathered: Layers, *, examples: int, states: tuple[int, int]) -> int:
    """Return the bytes of the update to a plan. ``states`` are the rounds of the loaded and the saved state."""
    update = ClientUpdate(
        layers=layers,
        uploaded_parts=gathered,
        partition_id=0,
        num_examples=examples,
        train_loss=1.0,
        seconds=1.0,
        state_rounds=states,
    )
    return content_bytes(update.to_content(TrainPlan.from_content(plan)))


def _oldest_checkpoint(components: RunComponents, *, before: int) -> int:
    """Return the round of the oldest checkpoint at the start of a round; 0 if there is none."""
    recording = components.settings.recording
    saved: Sequence[int] = range(recording.checkpoint_every, before, recording.checkpoint_every)
    return min(saved[-recording.keep_checkpoints :], default=0)
