"""All callbacks of a run, in their order.

Those that record a round run while the next one does, if that changes no number and cores are free.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from flwr.serverapp import Grid

from fedssl.logs import log
from fedssl.machine.process import available_cores
from fedssl.methods.base import build_method
from server_app.build import RunComponents
from server_app.callbacks.base import Callback, Callbacks, RoundEnd, RunEnd
from server_app.callbacks.delivery import Delivery
from server_app.callbacks.early_stopping import EarlyStop
from server_app.callbacks.evaluation import Evaluation, Results
from server_app.callbacks.lines import Costs, Lines, Progress, Tracking
from server_app.callbacks.models import Checkpoints, Collapse, CollapseReports, Snapshots
from server_app.callbacks.personalized import Personalized
from server_app.callbacks.summary import Summary
from server_app.checkpoint import check_strategy_states
from server_app.client_states import ClientStates
from server_app.console import PlainConsole
from server_app.fleet_file import FleetFile
from server_app.messaging import ClientMessenger
from server_app.nodes import ClientManager
from server_app.run_folder import RunFolder
from server_app.trackers.base import SafeTracker


def can_evaluate_in_background(components: RunComponents, client_cores: int | None) -> bool:
    """Return whether rounds may be evaluated and recorded while the next one runs.

    ``client_cores`` is the number of cores of this machine that clients occupy; None if unknown.
    """
    settings = components.settings
    if components.client_data is None:  # edge clients run elsewhere
        client_cores = 0
    return (
        client_cores is not None
        and available_cores() - client_cores >= settings.machine.threads
        # A repeated round releases the images' model again, so that its checkpoint precedes the next plan.
        and (settings.privacy is None or components.client_data is not None)
        # Early stopping decides about the next round by the evaluation.
        and settings.evaluation.early_stopping.monitor is None
        # Other training or sampling here would share the random generator and the GPU's memory.
        and not components.evaluator.trains_network
        and not any(mod.trains for mod in components.federation.mods)
    )


class InBackground(Callbacks):
    """Callbacks that record one round after the other, those for which ``due`` returns True in a thread.

    ``threads`` is the number of torch's threads there.
    """

    def __init__(self, callbacks: Sequence[Callback], *, due: Callable[[int], bool], threads: int) -> None:
        super().__init__(callbacks)
        self._due, self._threads = due, threads
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluation")
        self._pending: Future[None] | None = None

    def wait(self) -> None:
        """Wait until all rounds are recorded; raises the error of the last one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def on_round_end(self, end: RoundEnd) -> None:
        self.wait()
        if self._due(end.state.round):
            self._pending = self._executor.submit(self._record, end)
        else:
            super().on_round_end(end)

    def on_run_end(self, end: RunEnd) -> None:
        """Wait for the last round. After an error of another one its own is not raised."""
        with end.collect_error():
            if end.error is not None and self._pending is not None and not self._pending.done():
                log.info("the last round is still being evaluated")
            self._executor.shutdown()
            if end.error is None:
                self.wait()
        super().on_run_end(end)

    def _record(self, end: RoundEnd) -> None:
        torch.set_num_threads(self._threads)
        super().on_round_end(end)


def make_callbacks(
    grid: Grid,
    components: RunComponents,
    folder: RunFolder,
    states: ClientStates,
    clients: ClientManager,
    fleet: FleetFile,
    *,
    screen: PlainConsole,
    client_cores: int | None,
    started: float,
) -> Callbacks:
    """Return the callbacks of a run that uses them.

    Clients use ``client_cores`` cores of this machine, None if unknown. ``started`` is the time of the run's start.

    What belongs to a round is written before its checkpoint, because a resumed run starts after that round.
    """
    settings, path, due = components.settings, folder.path, components.evaluator.due
    recording, tracker = settings.recording, SafeTracker(settings.recording)
    background = can_evaluate_in_background(components, client_cores)
    method, server = components.method, components.federation.strategy.server
    if background and settings.evaluation.every:
        # Not a copy, which would share the active stages with the method.
        method = build_method(settings.model).to(components.context.device)
    recorded = InBackground(
        [
            Evaluation(components.evaluator, method),
            CollapseReports(path),
            Lines(folder),
            Tracking(tracker, recording),
            Progress(screen, rounds=settings.rounds),
            Checkpoints(
                folder,
                states,
                recording,
                rounds=settings.rounds,
                check=partial(
                    check_strategy_states,
                    model_state_type=server.model_state_type,
                    strategy_state_type=server.strategy_state_type,
                ),
            ),
        ],
        due=lambda round: background and due(round),
        threads=settings.machine.threads,
    )
    few_images = len(components.client_data.few_images) if components.client_data else 0
    callbacks: list[Callback] = []
    if recording.snapshot_every:
        callbacks.append(Snapshots(path, every=recording.snapshot_every, rounds=settings.rounds))
    if components.monitor is not None:
        callbacks.append(Collapse(components.monitor, due=due))
    if components.costs is not None:
        callbacks.append(Costs(components.costs, wait=recorded.wait))
    callbacks.append(recorded)
    if settings.evaluation.early_stopping.monitor is not None:
        callbacks.append(EarlyStop(settings.evaluation.early_stopping, path, rounds=settings.rounds))
    callbacks.append(Results(components, path))
    if components.client_data is None and settings.engine.deliver_every is not None:
        callbacks.append(Delivery(grid, components.federation, clients, path, fleet))
    if settings.evaluation.personalized:
        callbacks.append(Personalized(ClientMessenger(grid), components, path))
    callbacks.append(Summary(folder, settings, tracker, few_images=few_images, started=started))
    return Callbacks(callbacks)
