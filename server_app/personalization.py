"""What clients of a simulation would use themselves, judged at the end of a run, clients that never trained included.

Every client shows its encoder (`strategies.base.ClientStrategy.personalized_model`): the global model, that of its cluster, its own among
neighbours, or one with parts that never leave it. A client that never trained, a newcomer, shows what it receives, and
what it has after a few epochs of its own. Each is judged on all test images, and on some in which classes are as
frequent as among the client's images (`fedssl.evaluation.alike`).
"""

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from flwr.app import Message

from fedssl.arrays import Layers
from fedssl.evaluation.alike import alike, part_of
from fedssl.evaluation.scores import Score, over_models
from fedssl.evaluation.subject import Subject
from fedssl.model_arrays import load_layers
from fedssl.seeding import torch_generator
from fedssl.wire.messages import Ask
from server_app.build import RunComponents
from server_app.messaging import MessageExchange
from server_app.plans import PlanBuilder
from server_app.replies import InvalidUpdate, read_model_index, read_update
from strategies.state import ServerState

log = logging.getLogger("fedssl")

USED, RECEIVED, ADAPTED = "clients", "newcomers", "adapted newcomers"

Scores = Mapping[str, Score]


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A client's encoder and what it is worth.

    Attributes
    ----------
    client : int
    model : str
        Name of the model that it comes from.
    whose : {"clients", "newcomers", "adapted newcomers"}
        Of a client that took part in training, or of one that did not, before or after some epochs of its own.
    everywhere, own : mapping of str to Score
        On all test images, and on those that are like the client's; the latter is empty if there are none.
    """

    client: int
    model: str
    whose: str
    everywhere: Scores
    own: Scores


def own_models(
    exchange: MessageExchange, components: RunComponents, state: ServerState, *, trained: Collection[int], epochs: int
) -> list[OwnModel]:
    """Ask all clients and judge what they show, in order of the clients.

    Parameters
    ----------
    exchange : MessageExchange
    components : RunComponents
        Of a simulation whose images have labels.
    state : ServerState
        After the last round.
    trained : collection of int
        Clients that took part in training; the others are newcomers.
    epochs : int
        For how long newcomers train.
    """
    context, judge = components.context, Judge(components)
    newcomers = sorted(context.nodes.keys() - set(trained))
    asks = {
        USED: (sorted(context.nodes.keys() & set(trained)), Ask()),
        RECEIVED: (newcomers, Ask(epochs=epochs)),
        ADAPTED: (newcomers if epochs else [], Ask(epochs=epochs, adapted=True)),
    }
    found = []
    for whose, (clients, ask) in asks.items():
        for client, model, layers in shown(exchange, components, state, clients, ask):
            everywhere, own = judge(client, layers)
            found.append(OwnModel(client=client, model=model, whose=whose, everywhere=everywhere, own=own))
    return sorted(found, key=lambda one: (list(asks).index(one.whose), one.client))


def means(found: Sequence[OwnModel]) -> dict[str, dict[str, Score]]:
    """Means over clients with their spread, under whose models they are, and on which images they were judged."""
    columns: dict[str, list[Scores]] = {}
    for one in found:
        for name, scores in ((one.whose, one.everywhere), (f"{one.whose}, own classes", one.own)):
            if scores:
                columns.setdefault(name, []).append(scores)
    return {name: over_models(rows) for name, rows in columns.items()}


def shown(
    exchange: MessageExchange, components: RunComponents, state: ServerState, clients: Sequence[int], ask: Ask
) -> Iterator[tuple[int, str, Layers]]:
    """Encoders as they arrive, each with its client and the name of the model that it comes from."""
    # Newcomers learn at the optimiser's own rate, and the server does not train once more.
    context = replace(components.context, lr_factor=lambda round: 1.0)
    if context.calibration is not None:
        context = replace(context, calibration=AtRest())
    candidates = {
        client: context.strategy.server.candidate_models(state, state.round + 1, client) for client in clients
    }
    plans = PlanBuilder(context, state, candidates=candidates, extra_models=(), keep_from=0)
    messages = [Message(ask.beside(plan.content), plan.metadata.dst_node_id, "train.own") for plan in plans.messages]
    client_of = {context.nodes[client]: client for client in clients}
    for reply in exchange.send_and_receive(messages, timeout=context.timeout):
        client = client_of.get(reply.metadata.src_node_id, -1)
        try:
            if reply.has_error():
                raise InvalidUpdate(reply.error.reason)
            names = candidates[client]
            update = read_update(reply, client, sent_to=context.nodes[client])
            yield client, names[read_model_index(reply, among=len(names))], update.layers
        except InvalidUpdate as reason:
            log.warning("client %d shows no encoder: %s", client, reason)


class AtRest:
    """A calibration whose time has passed."""

    at = "never"

    def __call__(self, round: int, layers: Layers) -> Layers:
        """The layers as they are."""
        return layers


class Judge:
    """Judges encoders by the protocols of the run's end; one that many clients share is judged once on all images."""

    def __init__(self, components: RunComponents) -> None:
        self._components = components
        self._known: dict[bytes, Scores] = {}
        self._last: tuple[bytes, Subject] | None = None

    def __call__(self, client: int, layers: Layers) -> tuple[Scores, Scores]:
        """What the encoder is worth on all test images, and on those like the client's."""
        client_data, evaluator = self._components.client_data, self._components.evaluator
        assert client_data is not None
        assert client_data.image_data.labels is not None  # the run was refused without them
        key = hashlib.sha256(b"".join(layers[name].tobytes() for name in sorted(layers))).digest()
        load_layers(self._components.method, layers)
        if self._last is None or self._last[0] != key:
            subject = evaluator.subject(self._components.method)
            assert subject is not None
            self._last = key, subject
        subject = self._last[1]
        if key not in self._known:
            self._known[key] = evaluator.judge(subject)
        own = client_data.image_data.labels[torch.from_numpy(client_data.parts[client])]
        generator = torch_generator(self._components.settings.seed, "alike", client)
        rows = alike(subject.test.labels, own, generator=generator)
        return self._known[key], evaluator.judge(part_of(subject, rows)) if len(rows) else {}
