"""Counts of the rounds of a run before it starts: clients, training steps and bytes.

The run's own code samples the clients, builds the plans from the untrained model, and sends them to clients that reply
at once, without training. The size of a plan or an update depends on names, shapes and the number of a round, not on
weights, and virtual time on sizes and FLOPs. The counts are therefore those of a run in which no client
fails or misses a deadline in wall-clock time. `count_notes` returns the exceptions.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedssl.errors import InputError, RunError
from fedssl.training import number_of_batches
from fedssl.wire.messages import ClientUpdate, TrainPlan
from fedssl.wire.records import content_bytes
from server_app.build import RunComponents
from server_app.exchanges.base import Late, Lost, Reply
from server_app.messaging import no_activity
from server_app.round import Round
from server_app.training_loop import start_round
from simulation.grid import LocalGrid
from strategies.mods.base import exchanged_layers
from strategies.round_start import ClientAssignment, StartingModel
from strategies.types import ServerState


@dataclass(frozen=True, kw_only=True)
class RoundCounts:
    """Counts of one round, of all clients that reply in it."""

    clients: int
    steps: int  # also of failed attempts
    bytes_down: int
    bytes_up: int
    models: int  # of the server after the round


def count_rounds(components: RunComponents, update: ClientUpdate) -> list[RoundCounts]:
    """Return the counts of all rounds; raises `InputError` if too few clients reply in one.

    The layers and numbers of ``update`` are replaced, its state is not. A calibration trains in every round, unless its
    epochs are 0.
    """
    counter, state, result = _RoundCounter(components, update), ServerState(), []
    for _ in range(components.settings.rounds):
        state, counts = counter.count(state)
        result.append(counts)
    return result


def count_batches(components: RunComponents, num_images: int) -> int:
    """Return the number of training steps in an epoch of these images."""
    batch_size, smallest = components.settings.training.batch_size, components.method.min_batch_size
    return number_of_batches(num_images, batch_size, min_batch_size=smallest)


def count_notes(components: RunComponents) -> list[str]:
    """Return which counts are not those of the run, and why."""
    federation, settings, notes = components.federation, components.settings, []
    if federation.strategy.server.exchanges_parts:
        name = settings.recording.choices.get("strategy")
        notes.append(f"bytes are those of whole models: strategy={name} sends fewer layers, selected by weights")
    if settings.statistics.measured is not None:
        notes.append("bytes are without the numbers of dataset.mean=federated, which are sent with each plan")
    if settings.recording.max_state_bytes is not None:
        notes.append("bytes are those of clients with all states: client_state.max_bytes deletes some")
    return notes


@dataclass(frozen=True)
class _Sent:
    """Plan that a client has received in a round."""

    round: int
    slot: ClientAssignment
    start: StartingModel
    content: RecordDict


class _RoundCounter:
    """Counter of the rounds of a run, in their order."""

    def __init__(self, components: RunComponents, update: ClientUpdate) -> None:
        assert components.client_data is not None
        self._components, self._update = components, update
        self._num_images = [len(part) for part in components.client_data.parts]
        grid = LocalGrid(_untrained_clients(), num_clients=components.settings.num_clients)
        self._exchange = components.make_exchange(grid, no_activity)
        self._unanswered: dict[int, _Sent] = {}  # by client
        self._sizes: dict[Hashable, int] = {}  # of replies

    def count(self, state: ServerState) -> tuple[ServerState, RoundCounts]:
        """Return the state after the next round, and its counts."""
        attempted, replied, lost, steps = self._attempt(state)
        bytes_up, state_rounds = 0, {**state.state_rounds}  # of a lost client as well: it keeps its state
        for client, sent in replied.items():
            loaded = state_rounds.get(client, 0)
            state_rounds[client] = sent.round if self._update.state_rounds[1] else loaded
            bytes_up += self._reply_bytes(sent, state_rounds=(loaded, state_rounds[client]))
        used = {name for sent in replied.values() for name in sent.slot.candidates}
        unused = {name for slot in attempted.slots.values() for name in slot.candidates} - used
        models = {name: start.model for name, start in attempted.starts.items() if name not in unused}
        known = {client: last for client, last in state.last_participation.items() if client not in lost}
        state = ServerState(
            round=attempted.number,
            models={**state.models, **models},
            last_participation=known | {client: (sent.round, sent.slot.start) for client, sent in replied.items()},
            state_rounds=state_rounds,
        )
        return state, RoundCounts(
            clients=len(replied),
            steps=steps,
            bytes_down=sum(sent.slot.bytes_down for sent in replied.values()),
            bytes_up=bytes_up,
            models=len(state.models),
        )

    def _attempt(self, state: ServerState) -> tuple[Round, dict[int, _Sent], set[int], int]:
        """Return the first attempt at a round with enough replies, these, the lost clients, and the steps so far."""
        components, steps = self._components, 0
        federation, recording = components.federation, components.settings.recording
        saved = range(recording.checkpoint_every, state.round + 1, recording.checkpoint_every)
        oldest = min(saved[-recording.keep_checkpoints :], default=0)
        passes = components.settings.training.epochs * federation.strategy.client.trainings_per_round
        for attempt in range(federation.policy.max_retries + 1):
            try:
                attempted = start_round(self._exchange, federation, state, attempt=attempt, oldest_resumable=oldest)
            except RunError as error:
                raise InputError(error) from error
            replied, lost = self._exchange_plans(attempted)
            steps += passes * sum(count_batches(components, self._num_images[client]) for client in replied)
            if len(replied) >= federation.policy.min_updates:
                return attempted, replied, lost, steps
        raise InputError(
            f"round {attempted.number} would end the run: {len(replied)} of {len(attempted.slots)} clients reply in "
            f"virtual time and aggregation.min_updates={federation.policy.min_updates} are needed; lower it, raise "
            "aggregation.max_retries, or change the settings of availability"
        )

    def _exchange_plans(self, attempted: Round) -> tuple[dict[int, _Sent], set[int]]:
        """Send the plans of a round; return those with a reply, also of earlier rounds, and the lost clients."""
        for client, slot in attempted.slots.items():
            start, content = attempted.starts[slot.start], attempted.contents[client]
            self._unanswered[client] = _Sent(attempted.number, slot, start, content)
        replied: dict[int, _Sent] = {}
        lost: set[int] = set()
        for item in self._exchange.replies(attempted.sent):
            match item:
                case Reply():
                    replied[item.client] = self._unanswered.pop(item.client)
                case Late():
                    client = self._components.federation.clients[item.plan.metadata.dst_node_id]
                    replied[client] = self._unanswered.pop(client)
                case Lost():
                    lost.add(item.client)
                    del self._unanswered[item.client]
        return replied, lost

    def _reply_bytes(self, sent: _Sent, *, state_rounds: tuple[int, int]) -> int:
        components, slot, images = self._components, sent.slot, self._num_images[sent.slot.client]
        plan = TrainPlan.from_content(sent.content)
        layers, arrays = sent.start.expected_upload.layers, sent.start.expected_arrays.layers
        # An integer has 7 bits in a byte of Flower's records, and one for the sign.
        lengths = tuple(value.bit_length() // 7 for value in (sent.round, images, *state_rounds))
        key = (*layers, slot.variants, lengths, tuple(plan.metrics))
        if key not in self._sizes:
            reply = replace(
                self._update,
                layers=exchanged_layers(components.federation.mods, layers, slot.variants),
                strategy_arrays=arrays,
                num_examples=images,
                state_rounds=state_rounds,
            )
            content = reply.to_content(plan, components.context.codec)
            self._sizes[key] = content_bytes(content)
        return self._sizes[key]


def _untrained_clients() -> ClientApp:
    """Return an app whose clients reply at once."""
    app = ClientApp()

    @app.train()
    def reply(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    return app
