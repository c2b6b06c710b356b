"""One round: from a state and the clients' updates to the next state.

A `Round` contains no algorithm. It calls the server side of the strategy for what the algorithm defines, and does what
is the same for all: sampling, validation and ordering of replies, and the metrics of each client. Every client is
compared with the model that it started from.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from fedssl.arrays import Layers
from fedssl.rules import check_rules
from fedssl.safe_io import sanitize_line
from server_app.client_models import ClientModels, MappedValues
from server_app.exchanges.base import Exchange, Late, Lost, Received, Reply, SentRound, Sum, TooFewUpdatesError
from server_app.exchanges.sums import LostSumError, SumClient, SumTask
from server_app.federation import Federation
from server_app.model_aggregation import ModelAggregation
from server_app.plans import PlanBuilder, client_workloads
from server_app.updates import CollectedUpdates, RoundResult, UpdateReader, ValidUpdate, norm_outliers
from server_app.validation import InvalidUpdate
from strategies.low_rank_aggregation import REPLACING_FACTORS, low_rank_aggregation
from strategies.types import GLOBAL, GlobalModel, Mergeable, RoundOutcome, ServerState, model_suffix
from strategies.update_store import UpdateStorage, UpdateStore

log = logging.getLogger("fedssl")

UpdateObserver = Callable[[int, Layers], None]  # gets the client and the active layers of every update that is used


class Round:
    """The round that follows a state. ``number`` counts from 1, and ``messages`` has one for each client that trains.

    ``slots`` are the clients by id, in the order of the messages, and ``starts`` the models that they start from.

    ``attempt`` is the number of earlier attempts at this round. A resumed run may go back to ``oldest_resumable``.
    Clients ``in_flight``, which still train for an older plan, and those that are ``offline`` are not sampled.
    ``observers`` are called with every update that is used.
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
        self._cluster_models = server.models_to_cluster(state, self.number)
        state = state.with_models(self._cluster_models)
        self._federation, self._state = federation, state
        clients = federation.sample(self.number, attempt=attempt, in_flight=in_flight, offline=offline)
        self._attempt, self._sampled, self._observers = attempt, frozenset(clients), observers
        self._policy = federation.policy.for_round(federation.clients_per_round)
        candidates = {client: server.candidate_models(state, self.number, client) for client in clients}
        targets = dict.fromkeys(self._cluster_models or self._policy.models)
        for client, names in candidates.items():
            targets |= dict.fromkeys(into for name in names for into in self._targets(client, name))
        plans = PlanBuilder(
            federation,
            state,
            candidates=candidates,
            extra_models=targets,
            oldest_resumable=oldest_resumable,
            resend_base=attempt > 0,
        )
        self.starts, self.slots, self.messages = plans.starts, plans.slots, plans.messages
        self._storage = UpdateStorage(federation.settings.recording.folder)
        self._aggregations = {
            name: ModelAggregation.new(federation, self._storage, round=self.number, name=name) for name in targets
        }
        self._reader = UpdateReader(
            federation,
            self.starts,
            number=self.number,
            required_metrics=server.aggregator(self.number).required_metrics,
            state_rounds=state.state_rounds,
        )
        self._state_rounds = {**state.state_rounds}
        self._result = RoundResult(self.number)
        for aggregation in self._aggregations.values():
            if isinstance(aggregation.aggregator, Mergeable):
                aggregation.aggregator.set_clients(clients)
        if federation.round_rules:
            check_rules(federation.round_rules, plans.exchange(self._aggregations))

    def run(self, exchange: Exchange) -> tuple[ServerState, RoundResult]:
        """Let the clients train, and return the next state and what happened; raises `TooFewUpdatesError`."""
        state, result = self.finish(exchange.replies(self.sent))
        return state, exchange.record(result)

    @property
    def sent(self) -> SentRound:
        """Return what an exchange needs to send this round."""
        federation = self._federation
        workloads = partial(
            client_workloads, federation, self.number, starts=self.starts, slots=self.slots, messages=self.messages
        )
        return SentRound(
            round=self.number,
            messages=self.messages,
            nodes={federation.nodes[client]: client for client in self.slots},
            clients=federation.clients,
            starts=self.starts,
            aggregators={name: aggregation.aggregator for name, aggregation in self._aggregations.items()},
            policy=self._policy,
            timeout=federation.settings.reply_timeout,
            sum_task=self.sum_task,
            workloads=workloads,
        )

    def sum_task(self) -> SumTask | None:
        """Return what clients' processes need to sum their updates; None if the server needs each update."""
        federation, server = self._federation, self._federation.strategy.server
        start, aggregation = self.starts.get(GLOBAL), self._aggregations.get(GLOBAL)
        if start is None or aggregation is None or len(self.starts) > 1 or self._cluster_models:
            return None
        filters = federation.settings.aggregation.max_norm_ratio is not None
        sees_updates = any(mod.sees_updates for mod in federation.mods)
        if self._observers or server.num_comparison_images or filters or sees_updates:
            return None
        aggregator = aggregation.aggregator
        if not isinstance(aggregator, Mergeable) or not aggregator.can_merge or aggregation.products is not None:
            return None
        if any(self._targets(client, GLOBAL) != (GLOBAL,) for client in self.slots):
            return None
        clients = {
            federation.nodes[client]: SumClient(client, slot.downloaded, self._state.state_rounds.get(client, 0))
            for client, slot in self.slots.items()
        }
        return SumTask(
            round=self.number,
            attempt=self._attempt,
            validator=self._reader.validator,
            expected=start.expected_upload,
            aggregator=aggregator,
            clients=clients,
        )

    def finish(self, received: Iterable[Received]) -> tuple[ServerState, RoundResult]:
        """Aggregate what is received, in its order, and return the next state; raises `TooFewUpdatesError`."""
        settings = self._federation.settings
        for name, aggregation in self._aggregations.items():
            aggregation.start(self.starts[name].expected_upload)
        collected: CollectedUpdates | None = None
        if settings.aggregation.max_norm_ratio is not None or self._cluster_models:
            combines = low_rank_aggregation(settings) not in REPLACING_FACTORS
            # These compare all updates before any of them is used.
            collected = CollectedUpdates(self._storage, self.starts, compares_factors=combines)
        use = self._accumulate if collected is None else collected.add
        for item in received:
            valid = self._receive(item)
            del item  # a reply is a whole model: free it before the next one is created
            if valid is not None:
                use(valid)
            del valid
        if collected is not None:
            self._select(collected)
            for valid in collected:
                self._accumulate(valid)
                del valid  # its layers may be copies
        state = self._finalize()
        self._storage.close()
        return state

    def _targets(self, client: int, start: str) -> tuple[str, ...]:
        """Return the models that a client's update goes into; none if updates are clustered after all have arrived."""
        if self._cluster_models:
            return ()
        server = self._federation.strategy.server
        names = dict.fromkeys(server.destination_models(self._state, self.number, client, start))
        if server.models_per_client:  # a client that is not sampled keeps its model
            return tuple(name for name in names if int(name) in self._sampled)
        return tuple(names)

    # --- replies ---

    def _receive(self, item: Received) -> ValidUpdate | None:
        """Return the valid update of a reply. Add a sum, or drop a client without a usable update."""
        match item:
            case Reply():
                return self._read(item)
            case Late():
                return self._read_late(item)
            case Sum():
                self._merge(item)
            case Lost():
                self._drop(item.client, item.reason)
        return None

    def _read(self, reply: Reply) -> ValidUpdate | None:
        slot = self.slots[reply.client]
        try:
            valid = self._reader.read(slot, reply.message)
        except InvalidUpdate as reason:
            self._drop(reply.client, str(reason))
            return None
        slot.destinations = self._targets(reply.client, slot.start)
        return valid

    def _read_late(self, late: Late) -> ValidUpdate | None:
        """Return the update of a reply to an earlier plan, applied to the current model; None if it is not used."""
        node = late.plan.metadata.dst_node_id
        client, rebase = self._federation.clients.get(node), self._policy.rebase
        if client is None or rebase is None or late.message.has_error():
            self._result.late.append(node if client is None else client)
            return None
        try:
            valid: ValidUpdate = rebase(self._reader, client, plan=late.plan, reply=late.message)
        except InvalidUpdate as reason:
            self._drop(client, str(reason))
            return None
        self.slots[client] = valid.slot
        return valid

    def _merge(self, received: Sum) -> None:
        """Add a sum of updates, or drop its clients if it is lost."""
        aggregator = self._aggregations[GLOBAL].aggregator
        assert isinstance(aggregator, Mergeable)
        try:
            aggregator.merge(received.total.get())
        except LostSumError as reason:
            for client in received.updates:
                self._drop(client, str(reason))
            return
        for client, summed in received.updates.items():
            slot = self.slots[client]
            slot.destinations = self._targets(client, slot.start)
            self._record(ValidUpdate(slot, summed.update, summed.cosines, summed.num_bytes))

    def _select(self, collected: CollectedUpdates) -> None:
        """Remove outliers, whose clients are dropped, and set the clusters of all others as destinations."""
        factor = self._federation.settings.aggregation.max_norm_ratio
        if factor is not None:
            for client, reason in norm_outliers(collected.norms(), factor=factor).items():
                self._drop(client, reason)
                collected.remove(client)
        if self._cluster_models:
            clients: list[int] = []
            deltas: UpdateStore | None = None
            for client, delta in collected.deltas():
                if deltas is None:
                    deltas = self._storage.new_store(delta, self._federation.context.factor_pairs)
                deltas.add(delta)
                clients.append(client)
            if deltas is None:
                return
            for client, name in self._federation.strategy.server.assign_clusters(clients, deltas).items():
                self.slots[client].destinations = (name,)
            deltas.close()

    def _drop(self, client: int, reason: str) -> None:
        self._result.dropped[client] = sanitize_line(reason, max_chars=500)

    def _accumulate(self, valid: ValidUpdate) -> None:
        slot, update, federation = valid.slot, valid.update, self._federation
        start = self.starts[slot.start]
        layers = {**start.frozen, **update.layers}
        if federation.strategy.server.num_comparison_images:
            slot.features = federation.extract_features(layers)
        for mod in federation.mods:
            update = mod.contribute(update, start)
        for name in slot.destinations:
            self._aggregations[name].add(update, valid.cosines)
        for observe in self._observers:
            observe(slot.client, layers)
        self._record(valid)

    def _record(self, valid: ValidUpdate) -> None:
        """Record an update that was added."""
        slot, update = valid.slot, valid.update
        for name in slot.destinations:
            self._aggregations[name].received[slot.client] = slot.downloaded
            self._aggregations[name].gathered.append(update.uploaded_parts)
        self._result.clients.append(valid.metrics(self.number))
        if any(update.state_rounds):
            self._state_rounds[slot.client] = update.state_rounds[1]

    # --- the new state ---

    def _finalize(self) -> tuple[ServerState, RoundResult]:
        federation, result = self._federation, self._result
        for reason, clients in self._clients_by_reason().items():
            log.warning("round %d: %s dropped: %s", self.number, clients, reason)
        if len(result.clients) < federation.policy.min_updates:
            raise TooFewUpdatesError(self._too_few())
        server = federation.strategy.server
        aggregated = {
            name: self._aggregate(name)
            for name, aggregation in self._aggregations.items()
            if aggregation.received and not server.keeps_model(name, aggregation.received)
        }
        last_participation = {**self._state.last_participation}
        last_participation |= {row.client: (self.number - row.staleness, row.model) for row in result.clients}
        participated = {row.client for row in result.clients}
        for client in result.dropped:  # its state is unknown
            last_participation.pop(client, None)
            self._state_rounds.pop(client, None)
        for mod in federation.mods:
            result.features.update(mod.record(self.number, dropped=result.dropped))
        known = self._state.models
        models = known.updated(aggregated) if isinstance(known, ClientModels) else {**known, **aggregated}
        state = replace(
            self._state,
            round=self.number,
            models=models,
            last_participation=last_participation,
            state_rounds=self._state_rounds,
            evicted={client: evicted for client, evicted in self._state.evicted.items() if client not in participated},
        )
        slots = {row.client: self.slots[row.client] for row in result.clients}
        outcome = RoundOutcome(
            round=self.number,
            destinations={client: slot.destinations for client, slot in slots.items()},
            bytes_up={row.client: row.bytes_up for row in result.clients},
            client_features={client: slot.features for client, slot in slots.items() if slot.features is not None},
            extract_features=federation.extract_features,
        )
        current = MappedValues(state.models, lambda model: federation.context.advance_to_phase(model, self.number))
        strategy_state, strategy_metrics = server.on_round_end(replace(state, models=current), outcome)
        result.strategy_metrics.update(strategy_metrics)
        return replace(state, strategy_state=strategy_state), result

    def _aggregate(self, name: str) -> GlobalModel:
        federation, start, aggregation = self._federation, self.starts[name], self._aggregations[name]
        model = start.model
        new, weights = aggregation.finish(start.frozen)
        states = {**model.mod_states}
        for mod in federation.mods:
            key, used = type(mod).__name__, len(aggregation.received)
            new, states[key] = mod.finish(new, start, states.get(key, {}), used=used, round=self.number)
        trained = {**start.trainable, **new}
        strategy_state, strategy_metrics = federation.strategy.server.after_aggregation(
            model, self.number, trained, aggregator=aggregation.aggregator, received=aggregation.received
        )
        suffix = model_suffix(name)
        self._result.strategy_metrics.update({f"{key}{suffix}": value for key, value in strategy_metrics.items()})
        model = replace(
            model,
            layers={**model.layers, **weights, **trained},
            broadcast=federation.context.method.aggregate_parts(aggregation.gathered, model.broadcast),
            strategy_state=strategy_state,
            mod_states={mod: state for mod, state in states.items() if state},
            num_updates=model.num_updates + 1,
        )
        for mod in federation.mods:
            model = mod.end(model, self.number)
        return model

    def _clients_by_reason(self) -> dict[str, str]:
        """Return the dropped clients, e.g. ``client 1, 5``, by reason: of diverged training all have the same."""
        clients: dict[str, list[str]] = {}
        for client, reason in self._result.dropped.items():
            clients.setdefault(reason, []).append(str(client))
        return {reason: f"client {', '.join(ids)}" for reason, ids in clients.items()}

    def _too_few(self) -> str:
        reasons = "; ".join(f"{clients}: {reason}" for reason, clients in self._clients_by_reason().items())
        used, needed = len(self._result.clients), self._federation.policy.min_updates
        sent = f"{used or 'none'} of {len(self.slots)} clients sent a usable update"
        needed_text = f" and aggregation.min_updates={needed} are needed" if used else ""
        return f"round {self.number}: {sent}{needed_text} ({reasons})"


def run_round(
    exchange: Exchange,
    current_federation: Callable[[], Federation],
    state: ServerState,
    *,
    oldest_resumable: int = 0,
    observers: Sequence[UpdateObserver] = (),
) -> tuple[ServerState, RoundResult]:
    """Run the round after ``state``, and repeat it with other clients if it has too few usable updates.

    ``current_federation`` returns the federation with the clients that are available. The last attempt raises
    `TooFewUpdatesError`.
    """
    attempt = 0
    while True:
        federation = current_federation()
        policy, awaited = federation.policy, exchange.in_flight(timeout=federation.settings.reply_timeout)
        in_flight = {federation.clients[node] for node in awaited if policy.rebase and node in federation.clients}
        offline = exchange.offline(
            partial(federation.available_clients, in_flight),
            needed=max(policy.min_updates - len(in_flight), 0),
            wanted=federation.num_wanted(in_flight),
        )
        attempted = Round(
            federation,
            state,
            oldest_resumable=oldest_resumable,
            attempt=attempt,
            in_flight=in_flight,
            offline=offline,
            observers=observers,
        )
        try:
            return attempted.run(exchange)
        except TooFewUpdatesError as reason:
            if attempt == policy.max_retries:
                raise
            attempt += 1
            log.warning("%s; it is repeated with other clients (%d of %d)", reason, attempt, policy.max_retries)
