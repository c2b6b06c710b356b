"""Personalized evaluation at the end of a simulated run, clients that never trained included.

Every client returns its encoder (`strategies.base.ClientStrategy.personalized_model`): the global model, that of its
cluster, its own among neighbors, or one with local parts. Of a model with an average over rounds it receives the
average, which is evaluated and exported; layers that it keeps stay those of its last training. An unseen client, which
never trained, returns the received encoder and the one after a few local epochs. Each is evaluated on all test images,
and on a subset with the client's class frequencies (`fedssl.evaluation.sampling`).
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from flwr.app import Message

from fedssl.arrays import Layers
from fedssl.atomic_files import write_text
from fedssl.digests import identity
from fedssl.evaluation.protocol import EvaluationInput
from fedssl.evaluation.sampling import sample_label_matched
from fedssl.evaluation.scores import Score, format_table, mean_over_models, num_test_images, to_flat_dict
from fedssl.logs import log
from fedssl.model_arrays import load_layers
from fedssl.runs.jsonl import participants
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import torch_generator
from fedssl.wire.messages import PersonalizedModelRequest
from server_app.build import RunComponents
from server_app.callbacks.base import Callback, RunEnd
from server_app.client_models import MappedValues
from server_app.messaging import ClientMessenger
from server_app.plans import PlanBuilder
from server_app.run_folder import PERSONALIZED_FILE
from server_app.validation import InvalidUpdate, check_state_rounds, read_model_index, read_update
from strategies.types import ServerState

PARTICIPANTS, UNSEEN, UNSEEN_ADAPTED = "participants", "unseen clients", "adapted unseen clients"

MAX_CACHED_MODELS = 8  # models whose features and predictions are kept for further clients, such as clusters

Scores = Mapping[str, Score]


@dataclass(frozen=True)
class PersonalizedResult:
    """Results of a client's encoder."""

    client: int
    model: str  # from which the encoder was derived
    group: str  # PARTICIPANTS, UNSEEN or UNSEEN_ADAPTED
    global_test: Scores  # on all test images
    local_test: Scores  # on test images with the client's class frequencies; empty if there are none


def evaluate_personalized(
    messenger: ClientMessenger, components: RunComponents, state: ServerState, *, trained: Collection[int], epochs: int
) -> list[PersonalizedResult]:
    """Request and evaluate the encoders of all clients of a simulation with labels, in order of the clients.

    Clients that are not among ``trained`` are unseen clients, which train for ``epochs``.
    """
    federation, evaluator = components.federation, PersonalizedEvaluator(components)
    few_images = components.client_data.few_images if components.client_data else frozenset()
    unseen = sorted(federation.nodes.keys() - set(trained) - few_images)
    requests = {
        PARTICIPANTS: (sorted(federation.nodes.keys() & set(trained)), PersonalizedModelRequest()),
        UNSEEN: (unseen, PersonalizedModelRequest(adaptation_epochs=epochs)),
        UNSEEN_ADAPTED: (
            unseen if epochs else [],
            PersonalizedModelRequest(adaptation_epochs=epochs, after_adaptation=True),
        ),
    }
    results = []
    for group, (clients, request) in requests.items():
        for client, model, layers in request_personalized_encoders(messenger, components, state, clients, request):
            global_test, local_test = evaluator(client, layers)
            results.append(PersonalizedResult(client, model, group, global_test, local_test))
    return sorted(results, key=lambda result: (list(requests).index(result.group), result.client))


def mean_over_clients(results: Sequence[PersonalizedResult]) -> dict[str, dict[str, Score]]:
    """Return means over clients with standard deviations, by group and test images."""
    columns: dict[str, list[Scores]] = {}
    for row in results:
        for name, scores in ((row.group, row.global_test), (f"{row.group}, local test", row.local_test)):
            if scores:
                columns.setdefault(name, []).append(scores)
    return {name: mean_over_models(rows) for name, rows in columns.items()}


def request_personalized_encoders(
    messenger: ClientMessenger,
    components: RunComponents,
    state: ServerState,
    clients: Sequence[int],
    request: PersonalizedModelRequest,
) -> Iterator[tuple[int, str, Layers]]:
    """Yield encoders as they arrive, each with its client and the name of the model that it was derived from.

    If each client has a model, as many of them are in memory as in a round, see `server_app.update_memory`.
    """
    # Unseen clients train with the optimizer's base learning rate, and the server does not calibrate again.
    context = replace(components.context, lr_factor=lambda round: 1.0)
    federation = replace(components.federation.without_training(), context=context)
    server = federation.strategy.server
    evaluated = MappedValues(state.models, lambda model: replace(model, layers=model.evaluated))
    served = replace(state, models=evaluated)

    def request_batch(batch: Sequence[int]) -> Iterator[tuple[int, str, Layers]]:
        candidates = {client: server.candidate_models(state, state.round + 1, client) for client in batch}
        plans = PlanBuilder(federation, served, candidates=candidates, extra_models=(), oldest_resumable=0)
        messages = [
            Message(request.attach_to(content), federation.nodes[client], "train.personalized")
            for client, content in plans.contents.items()
        ]
        client_of = {federation.nodes[client]: client for client in batch}
        for message, reply in messenger.send_and_receive(messages, timeout=federation.settings.reply_timeout):
            client = client_of[message.metadata.dst_node_id]
            try:
                if reply.has_error():
                    raise InvalidUpdate(reply.error.reason)
                names = candidates[client]
                update = read_update(reply, client, sent_to=federation.nodes[client])
                check_state_rounds(update, round=state.round + 1, saved_round=state.state_rounds.get(client, 0))
                yield client, names[read_model_index(reply, num_models=len(names))], update.layers
            except InvalidUpdate as reason:
                log.warning("client %d returned no encoder: %s", client, reason)

    size = federation.clients_per_round if server.models_per_client else len(clients) or 1
    for start in range(0, len(clients), size):
        yield from request_batch(clients[start : start + size])  # which frees its plans and messages at its end


class PersonalizedEvaluator:
    """Evaluates encoders by the final protocol. An encoder that clients share is trained and evaluated once."""

    def __init__(self, components: RunComponents) -> None:
        self._components = components
        self._global_test: dict[str, Scores] = {}
        self._inputs: dict[str, EvaluationInput] = {}  # of the latest models, with their features and predictions

    def __call__(self, client: int, layers: Layers) -> tuple[Scores, Scores]:
        """Return the results on all test images, and on those with the client's class frequencies."""
        client_data, evaluator = self._components.client_data, self._components.evaluator
        assert client_data is not None
        assert client_data.image_data.labels is not None  # validated before the run
        key = identity(b"".join(layers[name].tobytes() for name in sorted(layers)))
        load_layers(self._components.method, layers)
        evaluation_input = self._inputs.pop(key, None) or evaluator.evaluation_input(self._components.method)
        assert evaluation_input is not None
        self._inputs[key] = evaluation_input
        if len(self._inputs) > MAX_CACHED_MODELS:
            del self._inputs[next(iter(self._inputs))]
        if key not in self._global_test:
            self._global_test[key] = evaluator.evaluate_final(evaluation_input)
        labels = client_data.image_data.labels[torch.from_numpy(client_data.parts[client])]
        generator = torch_generator(self._components.settings.seed, "alike", client)
        rows = sample_label_matched(evaluation_input.test.labels, labels, generator=generator)
        return self._global_test[key], evaluator.evaluate_final(evaluation_input.subset(rows)) if len(rows) else {}


class Personalized(Callback):
    """Evaluates the encoders of all clients, and writes the results."""

    def __init__(self, messenger: ClientMessenger, components: RunComponents, folder: Path) -> None:
        self._messenger, self._components, self._folder = messenger, components, folder

    def on_run_end(self, end: RunEnd) -> None:
        if end.status != "finished":
            return
        components = self._components
        trained = participants(self._folder)
        with set_active_stages(components.method, depth=components.context.phases[-1].depth):
            results = evaluate_personalized(
                self._messenger,
                components,
                end.state,
                trained=trained,
                epochs=components.settings.evaluation.adaptation_epochs,
            )
        if not results:
            log.warning("no client returned a personalized encoder")
            return
        averages = mean_over_clients(results)
        rows = [
            {
                **asdict(row),
                "global_test": to_flat_dict(row.global_test),
                "local_test": to_flat_dict(row.local_test),
                "local_test_images": num_test_images([row.local_test]),
            }
            for row in results
        ]
        end.personalized = {name: to_flat_dict(scores) for name, scores in averages.items()}
        write_text(self._folder / PERSONALIZED_FILE, json.dumps({"means": end.personalized, "clients": rows}, indent=1))
        log.info("personalized encoders, means over clients\n%s", format_table(averages))
