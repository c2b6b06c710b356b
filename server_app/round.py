"""One round: from a state and the clients' updates to the next state.

A `Round` contains no algorithm. It calls the server side of the strategy for what the algorithm defines, and does what
is the same for all: sampling, validation and ordering of replies, and the metrics of each client. Every client is
compared with the model that it started from.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from flwr.app import Message

from fedssl.arrays import NO_COSINES, Layers
from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.errors import RunError
from fedssl.rules import check_rules
from fedssl.safe_io import sanitize_line
from fedssl.wire.messages import ClientUpdate
from fedssl.wire.secure_aggregation import summed_size
from server_app.client_models import ClientModels, MappedValues
from server_app.exchanges.sums import LostSumError, SumClient, SumTask
from server_app.federation import Federation
from server_app.messaging import NO_REPLY, MessageExchange, ordered_by_client
from server_app.model_aggregation import ModelAggregation
from server_app.plans import PlanBuilder
from server_app.rules import round_rules
from server_app.secagg_round import TooFewParticipants
from server_app.secure_aggregation import apply_delta, max_weight_of, privacy_parameters, secure_mean_delta
from server_app.updates import CollectedUpdates, RoundResult, UpdateReader, ValidUpdate, norm_outliers
from server_app.validation import InvalidUpdate
from strategies.low_rank_aggregation import REPLACING_FACTORS, low_rank_aggregation
from strategies.types import GLOBAL, GlobalModel, Mergeable, RoundOutcome, ServerState, model_suffix
from strategies.update_store import UpdateStorage, UpdateStore
from strategies.weighted_sum import WeightedSum

log = logging.getLogger("fedssl")

UpdateObserver = Callable[[int, Layers], None]  # gets the client and the active layers of every update that is used


class TooFewUpdatesError(RunError):
    """A round has fewer usable updates than it needs."""


class Round:
    """The round that follows a state. ``number`` counts from 1, and ``messages`` has one for each client that trains.

    ``slots`` are the clients by id, in the order of the messages, and ``starts`` the models that they start from.

    ``attempt`` is the number of earlier attempts at this round. A resumed run may go back to ``oldest_resumable``.
    Clients ``in_flight`` still train for an older plan and are not sampled.
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
    ) -> None:
        server = federation.strategy.server
        self.number = state.round + 1
        self._cluster_models = server.models_to_cluster(state, self.number)
        state = state.with_models(self._cluster_models)
        self._federation, self._state = federation, state
        clients = federation.sample(self.number, attempt=attempt, in_flight=in_flight, offline=offline)
        self._attempt, self._sampled, self._summed = attempt, frozenset(clients), list[ValidUpdate]()
        candidates = {client: server.candidate_models(state, self.number, client) for client in clients}
        targets = dict.fromkeys(self._cluster_models or (GLOBAL,) * federation.settings.aggregation.buffered)
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
        if rules := round_rules(federation.settings):
            check_rules(rules, plans.exchange(self._aggregations))

    def sum_task(self, *, has_observers: bool) -> SumTask | None:
        """Return what clients' processes need to sum their updates; None if the server needs each update."""
        federation, settings, server = (
            self._federation,
            self._federation.settings.aggregation,
            self._federation.strategy.server,
        )
        start, aggregation = self.starts.get(GLOBAL), self._aggregations.get(GLOBAL)
        if start is None or aggregation is None or len(self.starts) > 1 or self._cluster_models:
            return None
        is_cut_off = settings.over_selection or settings.round_deadline is not None or settings.buffered
        compares = has_observers or server.num_comparison_images or settings.max_norm_ratio is not None
        if is_cut_off or compares or federation.privacy or federation.settings.secure_aggregation:
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

    def finish(
        self,
        replies: Iterable[Message],
        *,
        late_replies: Sequence[tuple[Message, Message]] = (),
        observers: Sequence[UpdateObserver] = (),
        drop_missing: bool = True,
        lost: Mapping[int, str] | None = None,
    ) -> tuple[ServerState, RoundResult]:
        """Aggregate the replies as they arrive, in order of the clients. Drop and report invalid updates.

        ``late_replies`` are plans of earlier rounds and the replies to them, read after all ``replies`` to `messages`.
        Observers are called with every update that is used. Clients without a reply are dropped if ``drop_missing``, or
        if ``lost`` has their nodes and a reason after the last reply. Raises `TooFewUpdatesError`.
        """
        for name, aggregation in self._aggregations.items():
            aggregation.start(self.starts[name].expected_upload)
        collected: CollectedUpdates | None = None
        if self._federation.settings.aggregation.max_norm_ratio is not None or self._cluster_models:
            combines = low_rank_aggregation(self._federation.settings) not in REPLACING_FACTORS
            # These compare all updates before any of them is used.
            collected = CollectedUpdates(self._storage, self.starts, compares_factors=combines)
        nodes = {self._federation.nodes[client]: client for client in self.slots}
        for client, reply in ordered_by_client(replies, sent=self.messages, clients=nodes):
            if reply == NO_REPLY and (not drop_missing or self._federation.nodes[client] in (lost or {})):
                continue
            valid = self._read_reply(client, reply)
            del reply  # a streamed update is a whole model: free it before the next one is created
            self._use(valid, collected, observers)
            del valid
        for plan, late_reply in sorted(late_replies, key=_by_staleness):
            self._use(self._read_late_reply(plan, late_reply), collected, observers)
        for node, reason in (lost or {}).items():
            self._drop(self._federation.clients[node], reason)
        if collected is not None:
            self._select(collected)
            for valid in collected:
                self._accumulate(valid, observers)
                del valid  # its layers may be copies
        state = self._finalize()
        self._storage.close()
        return state

    def finish_secure(
        self, exchange: MessageExchange, secure: SecureAggregationSettings
    ) -> tuple[ServerState, RoundResult]:
        """Let the clients train, and decrypt only the sum of their updates; raises `TooFewUpdatesError`."""
        federation, clients = self._federation, self._federation.clients
        contents = {message.metadata.dst_node_id: message.content for message in self.messages}
        settings, start = federation.settings.aggregation, self.starts[GLOBAL]
        aggregation = self._aggregations[GLOBAL]
        assert isinstance(aggregation.aggregator, WeightedSum)
        max_weight = max_weight_of(secure, aggregation.aggregator)
        try:
            secure_mean = secure_mean_delta(
                exchange,
                contents,
                secure,
                length=summed_size(start.expected_upload.layers),
                round=self.number,
                timeout=federation.settings.reply_timeout,
                deadline=settings.round_deadline,
                max_weight=max_weight,
            )
            layers = apply_delta(start.expected_upload.layers, secure_mean.delta)
        except TooFewParticipants as reason:
            raise TooFewUpdatesError(f"round {self.number}: {reason}") from reason
        participants = [clients[node] for node in secure_mean.nodes]
        for node, dropped in secure_mean.dropped.items():
            self._drop(clients[node], dropped)
        self._result.secure_aggregation.update(
            privacy_parameters(secure, secure_mean.graph, max_weight=max_weight),
            phases={name: asdict(cost) for name, cost in secure_mean.phases.items()},
        )
        aggregation.aggregator.start(start.expected_upload)
        mean = ClientUpdate(layers=layers, partition_id=participants[0])
        aggregation.aggregator.add_weighted(mean, 1.0)  # the clients' weights are in the mean
        for node, client in zip(secure_mean.nodes, participants, strict=True):
            slot = self.slots[client]
            slot.destinations, slot.bytes_down = (GLOBAL,), secure_mean.bytes_down[node]
            aggregation.received[client] = slot.downloaded
            update = replace(mean, partition_id=client)
            valid = ValidUpdate(slot, update, NO_COSINES, secure_mean.bytes_up[node])
            self._result.clients.append(valid.metrics(self.number))
        return self._finalize()

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

    def _read_reply(self, client: int, reply: Message | str) -> ValidUpdate | None:
        slot = self.slots[client]
        try:
            if isinstance(reply, str):
                raise InvalidUpdate(reply)
            valid = self._reader.read(slot, reply)
        except InvalidUpdate as reason:
            self._drop(client, str(reason))
            return None
        slot.destinations = self._targets(client, slot.start)
        return valid

    def _read_late_reply(self, plan: Message, reply: Message) -> ValidUpdate | None:
        """Return the update of a reply to an earlier plan, applied to the current model; None if it is not used."""
        node = plan.metadata.dst_node_id
        client = self._federation.clients.get(node)
        if client is None or reply.has_error() or not self._federation.settings.aggregation.buffered:
            self._result.late.append(node if client is None else client)
            return None
        try:
            valid = self._reader.read_late(client, plan, reply)
        except InvalidUpdate as reason:
            self._drop(client, str(reason))
            return None
        self.slots[client] = valid.slot
        return valid

    def _use(
        self, valid: ValidUpdate | None, collected: CollectedUpdates | None, observers: Sequence[UpdateObserver]
    ) -> None:
        if valid is not None and collected is not None:
            collected.add(valid)
        elif valid is not None:
            self._accumulate(valid, observers)

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

    def _accumulate(self, valid: ValidUpdate, observers: Sequence[UpdateObserver]) -> None:
        slot, update, federation = valid.slot, valid.update, self._federation
        if valid.remote_sum is not None:
            if self._summed and self._summed[0].remote_sum is not valid.remote_sum:
                self._add_summed()
            self._summed.append(valid)
            return
        self._add_summed()
        start = self.starts[slot.start]
        layers = {**start.frozen, **update.layers}
        if federation.strategy.server.num_comparison_images:
            slot.features = federation.extract_features(layers)
        if federation.privacy:
            update = replace(update, layers=federation.privacy.clip(update.layers, start.expected_upload.layers))
        for name in slot.destinations:
            self._aggregations[name].add(update, valid.cosines)
        for observe in observers:
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

    def _add_summed(self) -> None:
        """Add the sum of the first clients of the block, or drop these clients if it is lost."""
        summed, self._summed = self._summed, []
        if not summed:
            return
        aggregator, remote_sum = self._aggregations[GLOBAL].aggregator, summed[0].remote_sum
        assert isinstance(aggregator, Mergeable)
        assert remote_sum is not None
        try:
            aggregator.merge(remote_sum.get())
        except LostSumError as reason:
            for valid in summed:
                self._drop(valid.slot.client, str(reason))
            return
        for valid in summed:
            self._record(valid)

    # --- the new state ---

    def _finalize(self) -> tuple[ServerState, RoundResult]:
        self._add_summed()
        federation, result = self._federation, self._result
        for reason, clients in self._clients_by_reason().items():
            log.warning("round %d: %s dropped: %s", self.number, clients, reason)
        if len(result.clients) < federation.settings.aggregation.min_updates:
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
        if federation.privacy:
            result.privacy.update(federation.privacy.privacy_spent(self.number))
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
        model, layers = start.model, start.expected_upload.layers
        mean, weights = aggregation.finish(start.frozen)
        if federation.privacy:
            mean = federation.privacy.add_noise(mean, layers, used=len(aggregation.received), round=self.number)
        server_optimizer_state, new = federation.server_optimizer.step(
            model.server_optimizer_state, model.num_updates + 1, layers, mean
        )
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
            server_optimizer_state=server_optimizer_state,
            num_updates=model.num_updates + 1,
        )
        return federation.calibrate_if_due(model, self.number, when="end")

    def _clients_by_reason(self) -> dict[str, str]:
        """Return the dropped clients, e.g. ``client 1, 5``, by reason: of diverged training all have the same."""
        clients: dict[str, list[str]] = {}
        for client, reason in self._result.dropped.items():
            clients.setdefault(reason, []).append(str(client))
        return {reason: f"client {', '.join(ids)}" for reason, ids in clients.items()}

    def _too_few(self) -> str:
        reasons = "; ".join(f"{clients}: {reason}" for reason, clients in self._clients_by_reason().items())
        used, needed = len(self._result.clients), self._federation.settings.aggregation.min_updates
        sent = f"{used or 'none'} of {len(self.slots)} clients sent a usable update"
        needed_text = f" and aggregation.min_updates={needed} are needed" if used else ""
        return f"round {self.number}: {sent}{needed_text} ({reasons})"


def _by_staleness(pair: tuple[Message, Message]) -> tuple[int, int]:
    return int(pair[0].metadata.group_id), pair[0].metadata.dst_node_id
