"""The rounds of a run, each evaluated and recorded.

A round is evaluated while the next one runs, if that changes no number and cores are free
(`can_evaluate_in_background`).
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import torch

from fedssl.arrays import Layers
from fedssl.atomic_files import saved_rounds
from fedssl.evaluation.early_stopping import stop_reason
from fedssl.machine.process import available_cores
from fedssl.methods.base import SSLMethod, build_method
from fedssl.model_arrays import load_layers
from fedssl.schedule.phases import phase_at
from fedssl.schedule.stages import set_active_stages
from server_app.build import RunComponents
from server_app.client_models import ClientModels, MappedValues
from server_app.collapse_monitor import CollapseReport
from server_app.evaluator import ResultsByModel
from server_app.federation import Federation
from server_app.messaging import MessageExchange, replies_of
from server_app.nodes import base_holders
from server_app.plans import client_workloads
from server_app.recorder import Recorder
from server_app.round import Round, TooFewUpdatesError, UpdateObserver
from server_app.updates import RoundResult
from strategies.run_context import RunContext
from strategies.types import GlobalModel, ServerState

log = logging.getLogger("fedssl")


def can_evaluate_in_background(components: RunComponents, client_cores: int | None) -> bool:
    """Return whether rounds may be evaluated while the next one runs.

    ``client_cores`` is the number of cores of this machine that clients occupy; None if unknown.
    """
    settings = components.settings
    if components.client_data is None:  # edge clients run elsewhere
        client_cores = 0
    return (
        client_cores is not None
        and available_cores() - client_cores >= settings.machine.threads
        # Early stopping decides about the next round by the evaluation.
        and settings.evaluation.early_stopping.monitor is None
        # Other training or sampling here would share the random generator and the GPU's memory.
        and not components.evaluator.trains_network
        and settings.calibration is None
    )


class TrainingLoop:
    """All rounds of a run after a state; with ``background`` each is evaluated while the next one runs.

    ``paused`` is whether the run ended by ``pause_after``.
    """

    def __init__(
        self,
        exchange: MessageExchange,
        components: RunComponents,
        state: ServerState,
        recorder: Recorder,
        *,
        background: bool,
        deliver: Callable[[ServerState], None] = lambda state: None,
    ) -> None:
        self._exchange, self._components, self._recorder = exchange, components, recorder
        self._deliver = deliver  # sends the encoders of a state to devices, if that is due
        self.state = state
        self.paused = False
        self._dropped: set[int] = set()  # clients that may lack base layers although they reported them
        self._background_recorder = BackgroundRecorder(components, recorder, state, background=background)

    def run(self) -> ServerState:
        """Run all rounds, or those until a pause, and return the last state.

        An exception saves a checkpoint of all evaluated rounds.
        """
        settings, recorder = self._components.settings, self._recorder
        rule = settings.evaluation.early_stopping
        last = settings.rounds
        if settings.pause_after and settings.pause_after > self.state.round:
            last = min(last, settings.pause_after)
        if self._exchange.virtual_time is not None and self._components.costs is not None:
            # With the initial weights also in a resumed run: a solver's number of iterations may depend on them.
            for phase in self._components.context.phases:
                self._components.costs.step(phase)
        try:
            with self._background_recorder:
                while self.state.round < last and not stop_reason(recorder.evaluations, rule):
                    self._run_round()
        except BaseException:
            with suppress(OSError):  # the disk may be full
                recorder.checkpoint(self._background_recorder.state, ends=True)
            raise
        if self.state.round < settings.rounds:
            reason = stop_reason(recorder.evaluations, rule)
            self.paused = reason is None
            if reason is None:
                recorder.checkpoint(self.state, ends=True)
            else:
                recorder.record_early_stop(self.state, reason)
        return self.state

    def _run_round(self) -> None:
        components, recorder, number = self._components, self._recorder, self.state.round + 1
        start = time.monotonic()
        phase, due = phase_at(components.context.phases, number), components.evaluator.due(number)
        monitor, snapshot_writer = components.monitor if due else None, recorder.snapshot_writer(number)
        with set_active_stages(components.method, depth=phase.depth):
            self.state, result = run_round(
                self._exchange,
                self._current_federation,
                self.state,
                oldest_resumable=min(saved_rounds(recorder.folder / "checkpoints"), default=0),
                observers=[observer.observe for observer in (monitor, snapshot_writer) if observer is not None],
            )
            self._exchange.flush()  # a run that resumes from this round's checkpoint needs the client states
            self.state = replace(self.state, in_flight=self._exchange.snapshot())
            self._dropped |= result.dropped.keys()
            self.state, result = recorder.end_round(self.state, result)
            seconds = time.monotonic() - start
            clients = [row.client for row in result.clients]
            models = arrays_by_model(components.context, self.state) if due or snapshot_writer else {}
            if snapshot_writer:
                snapshot_writer.finish(models, used=clients)
            health = monitor.finish(models) if monitor else None
        self._background_recorder.wait()  # the GPU memory of a step is measured while nothing else uses the GPU
        self._background_recorder.submit(
            CompletedRound(
                state=self.state,
                result=result,
                models=models if due else {},
                depth=phase.depth,
                seconds=seconds,
                health=health,
                cost=components.costs(phase, clients) if components.costs else None,
            )
        )
        with set_active_stages(components.method, depth=phase.depth):
            self._deliver(self.state)

    def _current_federation(self) -> Federation:
        components = self._components
        clients = components.client_manager.wait_for(components.settings.aggregation.min_updates)
        self._recorder.register(clients)
        federation = components.federation
        if clients.nodes is not federation.nodes:  # else keep what it has cached about all clients
            federation = replace(federation, directory=clients)
        if federation.base and clients.client_ids:
            holders = base_holders(clients, federation.base_digest)
            federation = replace(federation, base_holders=holders - self._dropped)
        return federation


@dataclass(frozen=True, kw_only=True)
class CompletedRound:
    """A round that is not recorded yet."""

    state: ServerState
    result: RoundResult
    models: Mapping[str, Layers]  # empty if the round is not evaluated
    depth: int | None  # number of active stages of the encoder
    seconds: float
    health: CollapseReport | None
    cost: Mapping[str, float] | None


class BackgroundRecorder:
    """Evaluates and records rounds, in order. As a context manager it waits for the last one.

    With ``background`` rounds are evaluated in a thread, with a separate model. ``state`` is that after the last
    recorded round.
    """

    def __init__(self, components: RunComponents, recorder: Recorder, state: ServerState, *, background: bool) -> None:
        self._components, self._recorder, self._background = components, recorder, background
        self.state = state
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluation")
        self._pending: Future[None] | None = None
        # Not a copy, which would share the active stages with the method.
        separate = background and components.settings.evaluation.every > 0
        self._method = (
            build_method(components.settings.model).to(components.context.device) if separate else components.method
        )

    def __enter__(self) -> "BackgroundRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self._pending is not None and not self._pending.done():
            log.info("the last round is still being evaluated")
        self._executor.shutdown()
        if error is None:
            self.wait()

    def wait(self) -> None:
        """Wait until all submitted rounds are recorded; raises the error of the last one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def submit(self, completed: CompletedRound) -> None:
        """Evaluate and record a round, now or while the next one runs."""
        self.wait()
        if self._background and completed.models:
            self._pending = self._executor.submit(self._record, completed, in_background=True)
        else:
            self._record(completed)

    def _record(self, completed: CompletedRound, *, in_background: bool = False) -> None:
        evaluation: ResultsByModel = {}
        if in_background:
            torch.set_num_threads(self._components.settings.machine.threads)
        if completed.models:
            with set_active_stages(self._method, depth=completed.depth):
                evaluation = self._components.evaluator.evaluate(load_each(self._method, completed.models))
        # The lines are written first: a resumed run removes lines beyond the newest checkpoint.
        self._recorder.round(
            completed.result,
            seconds=completed.seconds,
            evaluation=evaluation,
            health=completed.health,
            cost=completed.cost,
        )
        self.state = completed.state  # an interrupt from here on saves this state
        self._recorder.checkpoint(completed.state)


def arrays_by_model(context: RunContext, state: ServerState) -> Mapping[str, Layers]:
    """Return the layers of every model by name, in the phase of the state's round.

    Models of single clients are read whenever they are needed.
    """

    def layers(model: GlobalModel) -> Layers:
        return context.advance_to_phase(model, state.round).layers

    if isinstance(state.models, ClientModels):
        return MappedValues(state.models, layers)
    return {name: layers(state.models[name]) for name in state.model_names()}


def load_each(method: SSLMethod, models: Mapping[str, Layers]) -> Iterator[tuple[str, SSLMethod]]:
    """Yield each name with the method, into which the model of that name is loaded."""
    for name, layers in models.items():
        load_layers(method, layers)
        yield name, method


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
