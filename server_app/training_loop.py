"""The rounds of a run, one after the other."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fedssl.schedule.phases import phase_at
from fedssl.schedule.stages import set_active_stages
from server_app.build import RunComponents
from server_app.callbacks.base import Callbacks, RoundEnd, RunEnd
from server_app.client_states import ClientStates
from server_app.federation import Federation
from server_app.fleet_file import FleetFile
from server_app.messaging import MessageExchange, replies_of
from server_app.models import arrays_by_model
from server_app.nodes import base_holders
from server_app.plans import client_workloads
from server_app.round import Round, TooFewUpdatesError, UpdateObserver
from server_app.updates import RoundResult
from strategies.types import ServerState

log = logging.getLogger("fedssl")


class TrainingLoop:
    """All rounds of a run after a state, until a callback stops it or it is paused."""

    def __init__(
        self,
        exchange: MessageExchange,
        components: RunComponents,
        state: ServerState,
        callbacks: Callbacks,
        states: ClientStates,
        fleet: FleetFile,
    ) -> None:
        self._exchange, self._components, self._callbacks = exchange, components, callbacks
        self._states, self._fleet = states, fleet
        self.state = state
        self._dropped: set[int] = set()  # clients that may lack base layers although they reported them

    def run(self, end: RunEnd) -> None:
        """Run all rounds, and store in ``end`` the last state and whether the run is paused."""
        settings = self._components.settings
        last = settings.rounds
        if settings.pause_after and settings.pause_after > self.state.round:
            last = min(last, settings.pause_after)
        if self._exchange.virtual_time is not None and self._components.costs is not None:
            # With the initial weights also in a resumed run: a solver's number of iterations may depend on them.
            for phase in self._components.context.phases:
                self._components.costs.step(phase)
        while self.state.round < last and self._callbacks.stop_reason() is None:
            self._run_round()
        end.state = self.state
        end.is_paused = self.state.round < settings.rounds and self._callbacks.stop_reason() is None

    def _run_round(self) -> None:
        components, number, start = self._components, self.state.round + 1, time.monotonic()
        phase = phase_at(components.context.phases, number)
        with set_active_stages(components.method, depth=phase.depth):
            self._callbacks.on_round_start(number)
            state, result = run_round(
                self._exchange,
                self._current_federation,
                self.state,
                oldest_resumable=self._states.oldest_resumable,
                observers=self._callbacks.observers,
            )
            self._exchange.flush()  # a run that resumes from this round's checkpoint needs the client states
            state = replace(state, in_flight=self._exchange.snapshot())
            self._dropped |= result.dropped.keys()
            self.state, result = self._states.end_round(state, result)
            self._callbacks.on_round_end(
                RoundEnd(
                    state=self.state,
                    result=result,
                    phase=phase,
                    seconds=time.monotonic() - start,
                    models=arrays_by_model(components.context, self.state),
                )
            )

    def _current_federation(self) -> Federation:
        components = self._components
        clients = components.client_manager.wait_for(components.settings.aggregation.min_updates)
        self._fleet.register(clients)
        federation = components.federation
        if clients.nodes is not federation.nodes:  # else keep what it has cached about all clients
            federation = replace(federation, directory=clients)
        if federation.base and clients.client_ids:
            holders = base_holders(clients, federation.base_digest)
            federation = replace(federation, base_holders=holders - self._dropped)
        return federation


def run_round(
    exchange: MessageExchange,
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
    attempt, start = 0, exchange.virtual_time
    while True:
        federation = current_federation()
        settings, timeout = federation.settings.aggregation, federation.settings.reply_timeout
        exchange.expire(older_than=timeout)
        in_flight = _in_flight(exchange, federation)
        attempted = Round(
            federation,
            state,
            oldest_resumable=oldest_resumable,
            attempt=attempt,
            in_flight=in_flight,
            offline=_offline(exchange, federation, in_flight),
        )
        min_replies = settings.min_updates if settings.buffered else None
        if settings.over_selection:
            min_replies = federation.clients_per_round
        exchange.schedule(
            partial(
                client_workloads,
                federation,
                attempted.number,
                starts=attempted.starts,
                slots=attempted.slots,
                messages=attempted.messages,
            )
        )
        exchange.sum_updates(partial(attempted.sum_task, has_observers=bool(observers)))
        replies = exchange.send_and_receive(
            attempted.messages, timeout=timeout, deadline=settings.round_deadline, min_replies=min_replies
        )
        try:
            if federation.settings.secure_aggregation:
                return attempted.finish_secure(exchange, federation.settings.secure_aggregation)
            state, result = attempted.finish(
                replies_of(replies),
                late_replies=exchange.late_replies,
                observers=observers,
                drop_missing=not exchange.is_reliable,
                lost=exchange.lost,
            )
            return state, _with_virtual_time(result, exchange, federation, start=start)
        except TooFewUpdatesError as reason:
            if attempt == settings.max_retries:
                raise
            attempt += 1
            log.warning("%s; it is repeated with other clients (%d of %d)", reason, attempt, settings.max_retries)


def _offline(exchange: MessageExchange, federation: Federation, in_flight: set[int]) -> frozenset[int]:
    """Return the clients that are offline once enough others are online; none in wall-clock time."""
    if exchange.virtual_time is None:
        return frozenset()
    settings = federation.settings.aggregation
    clients = federation.nodes.keys() - federation.untrained_clients - in_flight
    return exchange.wait_until_online(
        clients,
        number=max(settings.min_updates - len(in_flight), 0),
        wanted=federation.clients_per_round + settings.over_selection - len(in_flight),
    )


def _with_virtual_time(
    result: RoundResult, exchange: MessageExchange, federation: Federation, *, start: float | None
) -> RoundResult:
    """Return the result with the virtual time of the round and its clients, if there is virtual time."""
    now = exchange.virtual_time
    if now is None or start is None:
        return result
    seconds = exchange.client_seconds
    clients = [replace(row, virtual_seconds=seconds[federation.nodes[row.client]]) for row in result.clients]
    return replace(result, clients=clients, virtual_seconds=now - start, virtual_time=now)


def _in_flight(exchange: MessageExchange, federation: Federation) -> set[int]:
    if not federation.settings.aggregation.buffered:
        return set()
    return {federation.clients[node] for node in exchange.nodes_in_flight() if node in federation.clients}
