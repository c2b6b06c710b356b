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
from types import TracebackType

import torch

from fedssl.arrays import Layers
from fedssl.atomic_files import saved_rounds
from fedssl.early_stopping import stop_reason
from fedssl.machine.threads import available_cores
from fedssl.methods.base import SSLMethod
from fedssl.methods.build import build_method
from fedssl.model_arrays import load_layers
from fedssl.schedule.stages import set_active_stages
from server_app.build import RunComponents
from server_app.collapse_monitor import CollapseReport
from server_app.evaluator import ResultsByModel
from server_app.messaging import MessageExchange
from server_app.recorder import Recorder
from server_app.round import Round, RoundResult, TooFewUpdatesError, UpdateObserver
from server_app.round_context import RoundContext
from strategies.state import ServerState

log = logging.getLogger("fedssl")

CLIENT_CORES = "client-cores"  # in the ServerApp's node configuration: cores of this machine that clients occupy


def can_evaluate_in_background(components: RunComponents, client_cores: int | None) -> bool:
    """Whether rounds may be evaluated while the next one runs.

    Parameters
    ----------
    components : RunComponents
    client_cores : int or None
        Cores of this machine that clients occupy; None: nobody knows.
    """
    settings = components.settings
    if components.client_data is None:  # clients are devices
        client_cores = 0
    return (
        client_cores is not None
        and available_cores() - client_cores >= settings.machine.threads
        and settings.evaluation.early_stopping.monitor
        is None  # whether there is a next round depends on the evaluation
        # What else trains or draws here shares a random generator, and the GPU's memory, with nobody.
        and components.evaluation_is_training_free
        and settings.calibration is None
    )


def run_training(
    exchange: MessageExchange,
    components: RunComponents,
    state: ServerState,
    recorder: Recorder,
    *,
    last: int,
    background: bool,
) -> ServerState:
    """All rounds after ``state`` up to the last one, recorded; returns the state after it.

    Whatever ends them early, the rounds that are done and evaluated are in a checkpoint.
    """
    recording = BackgroundRecorder(components, recorder, state, background=background)
    rule = components.settings.evaluation.early_stopping
    try:
        with recording:
            while state.round < last and not stop_reason(recorder.evaluations, rule):
                state = run_next_round(exchange, components, state, recorder, recording)
    except BaseException:
        with suppress(OSError):  # the disk may be full
            recorder.checkpoint(recording.state, ends=True)
        raise
    if state.round < last:
        recorder.record_early_stop(state, stop_reason(recorder.evaluations, rule) or "")
    return state


@dataclass(frozen=True, kw_only=True)
class CompletedRound:
    """A round that is over.

    Attributes
    ----------
    state : ServerState
        After it.
    report : RoundResult
    models : mapping of str to Layers
        By name; empty unless they are to be evaluated.
    depth : int or None
        How many stages of the encoder ran.
    seconds : float
    health : CollapseReport or None
    cost : mapping of str to float, or None
    """

    state: ServerState
    report: RoundResult
    models: Mapping[str, Layers]
    depth: int | None
    seconds: float
    health: CollapseReport | None
    cost: Mapping[str, float] | None


class BackgroundRecorder:
    """Evaluates rounds and writes them down, in their order; as a context manager, which ends when that is done.

    Parameters
    ----------
    components : RunComponents
    recorder : Recorder
    state : ServerState
        That the rounds begin with.
    background : bool
        Whether this is done in a thread of its own, with a model of its own.

    Attributes
    ----------
    state : ServerState
        After the last round that is recorded.
    """

    def __init__(self, components: RunComponents, recorder: Recorder, state: ServerState, *, background: bool) -> None:
        self._components, self._recorder, self._background = components, recorder, background
        self.state = state
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluation")
        self._pending: Future[None] | None = None
        # No copy, which would share with the method what stages run.
        own = background and components.settings.evaluation.every > 0
        self._own = build_method(components.settings.model).to(components.device) if own else components.method

    def __enter__(self) -> "BackgroundRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self._pending is not None and not self._pending.done():
            log.info("the last round is still being evaluated")
        self._executor.shutdown()
        if error is None:
            self.wait()

    def wait(self) -> None:
        """Return when all rounds so far are recorded; raises what prevented that."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def submit(self, done: CompletedRound) -> None:
        """Evaluate and record one round more, now or beside the next."""
        self.wait()
        if self._background and done.models:
            self._pending = self._executor.submit(self._record, done, in_background=True)
        else:
            self._record(done)

    def _record(self, done: CompletedRound, *, in_background: bool = False) -> None:
        evaluation: ResultsByModel = {}
        if in_background:
            torch.set_num_threads(self._components.settings.machine.threads)
        if done.models:
            with set_active_stages(self._own, depth=done.depth):
                evaluation = self._components.evaluator.evaluate(load_each(self._own, done.models))
        # The lines go first: lines beyond the newest checkpoint are cut off when a run resumes.
        self._recorder.round(
            done.report, seconds=done.seconds, evaluation=evaluation, health=done.health, cost=done.cost
        )
        self._recorder.checkpoint(done.state)
        self.state = done.state


def run_next_round(
    exchange: MessageExchange,
    components: RunComponents,
    state: ServerState,
    recorder: Recorder,
    recording: BackgroundRecorder,
) -> ServerState:
    """The state after one round more, which is handed to the recording."""

    def current_context() -> RoundContext:
        clients = components.client_manager.wait_for(components.context.aggregation.min_updates)
        recorder.register(clients.client_ids)
        return replace(components.context, nodes=clients.nodes)

    start, number = time.monotonic(), state.round + 1
    phase, due = components.lr_schedule.phase(number), components.evaluator.due(number)
    monitor, snapshot_writer = components.monitor if due else None, recorder.snapshot_writer(number)
    observers = [one.observe for one in (monitor, snapshot_writer) if one is not None]
    with set_active_stages(components.method, depth=phase.depth):
        state, report = run_round(
            exchange,
            current_context,
            state,
            keep_from=min(saved_rounds(recorder.folder / "checkpoints"), default=0),
            observe=combine_observers(observers) if observers else None,
        )
        exchange.flush()  # whoever resumes from this round's checkpoint finds it
        seconds = time.monotonic() - start
        clients = [row.client for row in report.clients]
        models = arrays_by_model(components.context, state) if due or snapshot_writer else {}
        if snapshot_writer:
            snapshot_writer.finish(models, used=clients)
        health = monitor.finish(models) if monitor else None
    recording.wait()  # what a step needs of a GPU's memory is measured while nothing else needs it
    cost = components.costs(phase, clients) if components.costs else None
    recording.submit(
        CompletedRound(
            state=state,
            report=report,
            models=models if due else {},
            depth=phase.depth,
            seconds=seconds,
            health=health,
            cost=cost,
        )
    )
    return state


def combine_observers(observers: Sequence[UpdateObserver]) -> UpdateObserver:
    """One that lets all of them see."""

    def observe(client: int, layers: Layers) -> None:
        for one in observers:
            one(client, layers)

    return observe


def arrays_by_model(context: RoundContext, state: ServerState) -> dict[str, Layers]:
    """The layers of every model, by name and in order, in the phase that the state has come to."""
    return {name: context.advance_to_phase(state.models[name], state.round).layers for name in state.model_names()}


def load_each(method: SSLMethod, models: Mapping[str, Layers]) -> Iterator[tuple[str, SSLMethod]]:
    """The method with each of the models in it, one after the other, under its name."""
    for name, layers in models.items():
        load_layers(method, layers)
        yield name, method


def run_round(
    exchange: MessageExchange,
    current_context: Callable[[], RoundContext],
    state: ServerState,
    *,
    keep_from: int = 0,
    observe: UpdateObserver | None = None,
) -> tuple[ServerState, RoundResult]:
    """The round after ``state``, from sampling to the new state.

    Parameters
    ----------
    exchange : MessageExchange
        Of the run.
    current_context : callable
        Gives the context with the clients that are there.
    state, keep_from, observe
        As in `Round` and `Round.end`.

    Raises
    ------
    TooFewUpdatesError
        The last repetition had too few, too.
    """
    attempt = 0
    while True:
        context = current_context()
        aggregation = context.aggregation
        exchange.expire(older_than=context.timeout)
        one = Round(context, state, keep_from=keep_from, attempt=attempt, in_flight=_in_flight(exchange, context))
        min_replies = aggregation.min_updates if aggregation.buffered else None
        if aggregation.over_selection:
            min_replies = context.clients_per_round
        replies = exchange.send_and_receive(
            one.messages, timeout=context.timeout, deadline=aggregation.round_deadline, min_replies=min_replies
        )
        try:
            if context.secure_aggregation:
                return one.finish_secure(exchange, context.secure_aggregation)
            return one.finish(replies, late_replies=exchange.late_replies, observe=observe)
        except TooFewUpdatesError as reason:
            if attempt == aggregation.max_retries:
                raise
            attempt += 1
            log.warning("%s; it is repeated with other clients (%d of %d)", reason, attempt, aggregation.max_retries)


def _in_flight(exchange: MessageExchange, context: RoundContext) -> set[int]:
    """Clients whose late updates will be used."""
    if not context.aggregation.buffered:
        return set()
    owing = {message.metadata.dst_node_id for message in exchange.pending.values()}
    return {client for client, node in context.nodes.items() if node in owing}
