"""One round: from a state and the clients' updates to the next state.

A `Round` contains no algorithm. It does what is the same for all: it samples clients, plans, exchanges messages, and
passes valid updates to the aggregation. Every client is compared with the model that it started from.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, partial

from flwr.app import Message

from fedssl.rules import check_rules
from server_app.exchanges.base import Exchange, Late, Lost, Received, Reply, SentRound, Sum
from server_app.exchanges.sums import SumClient, SumTask
from server_app.federation import Federation
from server_app.plans import PlanBuilder, Routes, client_workloads
from server_app.round_aggregation import RoundAggregation, UpdateObserver
from server_app.updates import CollectedUpdates, RoundResult, UpdateReader, ValidUpdate
from server_app.validation import InvalidUpdate
from strategies.types import GLOBAL, ServerState
from strategies.update_store import UpdateStorage


class Round:
    """The round that follows a state. ``number`` counts from 1.

    ``slots`` are the clients that train by id, ``contents`` those of the messages to them, and ``starts`` the models
    that they start from. ``attempt`` is the number of earlier attempts at this round. A resumed run may go back to
    ``oldest_resumable``. Clients ``in_flight``, which still train for an older plan, and those that are ``offline`` are
    not sampled. ``observers`` are called with every update that is used.
    """

    def __init__(
        self,
        federation: Federation,
        state: ServerState,
        *,
        oldest_resumable: int = 0,
        attempt: int = 0,
        in_flight: Collection[int] = (),
        offline: Collection[int] = (),
        observers: Sequence[UpdateObserver] = (),
    ) -> None:
        server = federation.strategy.server
        self.number = state.round + 1
        clusters = server.models_to_cluster(state, self.number)
        state = state.with_models(clusters)
        self._federation, self._state, self._attempt = federation, state, attempt
        clients = federation.sample(self.number, attempt=attempt, in_flight=in_flight, offline=offline)
        self._policy = federation.policy.for_round(federation.clients_per_round)
        self._routes = Routes(server, state, clients, round=self.number, clusters=clusters, late=self._policy.models)
        plans = PlanBuilder(
            federation,
            state,
            candidates=self._routes.candidates,
            extra_models=self._routes.models,
            oldest_resumable=oldest_resumable,
            attempt=attempt,
        )
        self.starts, self.slots, self.contents = plans.starts, plans.slots, plans.contents
        self._storage = UpdateStorage(federation.settings.recording.folder)
        self._aggregation = RoundAggregation(
            federation,
            state,
            names=list(self._routes.models),
            clients=clients,
            starts=self.starts,
            storage=self._storage,
            observers=observers,
        )
        self._result = self._aggregation.result
        self._reader = UpdateReader(
            federation,
            self.starts,
            number=self.number,
            required_metrics=server.aggregator(self.number).required_metrics,
            state_rounds=state.state_rounds,
        )
        if federation.round_rules:
            check_rules(federation.round_rules, plans.exchange(self._routes.models))

    def run(self, exchange: Exchange) -> tuple[ServerState, RoundResult]:
        """Let the clients train, and return the next state and what happened; raises `TooFewUpdatesError`."""
        state, result = self.finish(exchange.replies(self.sent))
        return state, exchange.record(result)

    @cached_property
    def messages(self) -> list[Message]:
        """Return the message to each client, in their order, for the grid that is in use."""
        nodes, group = self._federation.nodes, str(self.number)
        return [Message(content, nodes[client], "train", group_id=group) for client, content in self.contents.items()]

    @property
    def sent(self) -> SentRound:
        federation = self._federation
        workload = partial(client_workloads, federation, self.number, starts=self.starts)
        return SentRound(
            round=self.number,
            messages=self.messages,
            nodes={federation.nodes[client]: client for client in self.slots},
            clients=federation.clients,
            starts=self.starts,
            aggregators={name: aggregation.aggregator for name, aggregation in self._aggregation.models.items()},
            policy=self._policy,
            timeout=federation.settings.reply_timeout,
            sum_task=self.sum_task,
            workloads=lambda: workload(slots=self.slots, contents=self.contents),
        )

    def sum_task(self) -> SumTask | None:
        """Return what clients' processes need to sum their updates; None if the server needs each update."""
        federation, aggregator = self._federation, self._aggregation.mergeable()
        if aggregator is None or self._routes.clusters or list(self.starts) != [GLOBAL]:
            return None
        if any(self._routes.destinations(client, GLOBAL) != (GLOBAL,) for client in self.slots):
            return None
        saved = self._state.state_rounds
        return SumTask(
            round=self.number,
            attempt=self._attempt,
            validator=self._reader.validator,
            expected=self.starts[GLOBAL].expected_upload,
            aggregator=aggregator,
            clients={
                federation.nodes[client]: SumClient(client, slot.downloaded, saved.get(client, 0))
                for client, slot in self.slots.items()
            },
        )

    def finish(self, received: Iterable[Received]) -> tuple[ServerState, RoundResult]:
        """Aggregate what is received, in its order, and return the next state; raises `TooFewUpdatesError`."""
        self._aggregation.start()
        collected: CollectedUpdates | None = None
        comparing = [mod for mod in self._federation.mods if mod.compares_updates]
        if comparing or self._routes.clusters:  # these compare all updates before any of them is used
            collected = CollectedUpdates(self._storage, self.starts, mods=comparing)
        use = self._aggregation.add if collected is None else collected.add
        for item in received:
            valid = self._receive(item)
            del item  # a reply is a whole model: free it before the next one is created
            if valid is not None:
                use(valid)
            del valid
        if collected is not None:
            self._select(collected)
            for valid in collected:
                self._aggregation.add(valid)
                del valid  # its layers may be copies
        state = self._aggregation.finish(self.slots)
        self._storage.close()
        return state, self._result

    def _receive(self, item: Received) -> ValidUpdate | None:
        """Return the valid update of a reply. Add a sum, or drop a client without a usable update."""
        match item:
            case Reply():
                return self._read(item)
            case Late():
                return self._read_late(item)
            case Sum():
                self._aggregation.merge(item, self.slots)
            case Lost():
                self._result.drop(item.client, item.reason)
        return None

    def _read(self, reply: Reply) -> ValidUpdate | None:
        slot = self.slots[reply.client]
        try:
            valid = self._reader.read(slot, reply.message)
        except InvalidUpdate as reason:
            self._result.reject(reply.client, str(reason))
            return None
        slot.destinations = self._routes.destinations(reply.client, slot.start)
        return valid

    def _read_late(self, late: Late) -> ValidUpdate | None:
        """Return the update of a reply to an earlier plan, if it is used."""
        node = late.plan.metadata.dst_node_id
        client = self._federation.clients.get(node)
        if client is None or not self._policy.uses_late or late.message.has_error():
            self._result.late.append(node if client is None else client)
            return None
        try:
            valid = self._reader.read_late(client, plan=late.plan, reply=late.message)
        except InvalidUpdate as reason:
            self._result.reject(client, str(reason))
            return None
        self.slots[client] = valid.slot
        return valid

    def _select(self, collected: CollectedUpdates) -> None:
        """Drop the clients that mods select, and set the clusters of all others as destinations."""
        for client, reason in collected.select().items():
            self._result.reject(client, reason)
        if self._routes.clusters:
            clusters = collected.assign(self._federation.strategy.server)
            for client, name in clusters.items():
                self.slots[client].destinations = (name,)
