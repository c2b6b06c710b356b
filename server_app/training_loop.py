"""The rounds of a run, one after the other. One with too few usable updates is repeated with other clients."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.schedule.phases import phase_at
from fedssl.schedule.stages import set_active_stages
from server_app.build import RunComponents
from server_app.callbacks.base import Callbacks, RoundEnd, RunEnd
from server_app.client_states import ClientStates
from server_app.exchanges.base import Exchange, TooFewUpdatesError
from server_app.federation import Federation
from server_app.fleet_file import FleetFile
from server_app.models import arrays_by_model
from server_app.nodes import ClientManager
from server_app.round import Round
from server_app.round_aggregation import UpdateObserver
from server_app.updates import RoundResult
from strategies.types import ServerState


def start_round(
    exchange: Exchange,
    federation: Federation,
    state: ServerState,
    *,
    attempt: int,
    oldest_resumable: int,
    observers: Sequence[UpdateObserver] = (),
) -> Round:
    """Return an attempt at the round after ``state``, with clients that are online and not in flight."""
    policy, awaited = federation.policy, exchange.in_flight(timeout=federation.settings.reply_timeout)
    in_flight = {federation.clients[node] for node in awaited if policy.uses_late and node in federation.clients}
    offline = exchange.offline(
        partial(federation.available_clients, in_flight),
        needed=max(policy.min_updates - len(in_flight), 0),
        wanted=federation.num_wanted(in_flight),
    )
    return Round(
        federation,
        state,
        oldest_resumable=oldest_resumable,
        attempt=attempt,
        in_flight=in_flight,
        offline=offline,
        observers=observers,
    )


def run_round(
    exchange: Exchange,
    current_federation: Callable[[], Federation],
    state: ServerState,
    *,
    oldest_resumable: int = 0,
    observers: Sequence[UpdateObserver] = (),
    on_failure: Callable[[int, Mapping[int, str]], None] = lambda round, dropped: None,
) -> tuple[ServerState, RoundResult]:
    """Run the round after ``state``, and repeat it with other clients if it has too few usable updates.

    ``current_federation`` returns the federation with the clients that are available. ``on_failure`` is called with the
    round and the dropped clients of each failed attempt, of which the last one raises `TooFewUpdatesError`.
    """
    attempt = 0
    while True:
        federation = current_federation()
        max_retries = federation.policy.max_retries
        attempted = start_round(
            exchange, federation, state, attempt=attempt, oldest_resumable=oldest_resumable, observers=observers
        )
        try:
            return attempted.run(exchange)
        except TooFewUpdatesError as reason:
            on_failure(attempted.number, reason.dropped)
            if attempt == max_retries:
                raise
            attempt += 1
            log.warning("%s; it is repeated with the available clients (%d of %d)", reason, attempt, max_retries)


class TrainingLoop:
    """All rounds of a run after a state, until a callback stops it or it is paused."""

    def __init__(
        self,
        exchange: Exchange,
        components: RunComponents,
        state: ServerState,
        callbacks: Callbacks,
        states: ClientStates,
        clients: ClientManager,
        fleet: FleetFile,
    ) -> None:
        self._exchange, self._components, self._callbacks = exchange, components, callbacks
        self._states, self._clients, self._fleet = states, clients, fleet
        self.state = state

    def run(self, end: RunEnd) -> None:
        """Run all rounds, and store in ``end`` the last state and whether the run is paused."""
        settings, done = self._components.settings, self.state.round
        if settings.pause_after and settings.pause_after <= done < settings.rounds:
            raise InputError(
                f"pause_after={settings.pause_after} but the run has completed {done} of {settings.rounds} rounds; set "
                f"pause_after={done + 1} or more, or leave it out"
            )
        last = min(settings.rounds, settings.pause_after or settings.rounds)
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
                on_failure=self._fleet.register_failure,
            )
            self._exchange.flush()  # a run that resumes from this round's checkpoint needs the client states
            state = replace(state, in_flight=self._exchange.snapshot())
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
        clients = self._clients.wait_for(components.settings.aggregation.min_updates)
        self._fleet.register(clients)
        federation = components.federation
        if clients.nodes is not federation.nodes:  # else keep what it has cached about all clients
            federation = replace(federation, directory=clients)
        return federation
