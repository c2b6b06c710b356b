"""All callbacks of a run, in their order."""

from flwr.serverapp import Grid

from fedssl.methods.base import build_method
from server_app.build import RunComponents
from server_app.callbacks.background import InBackground, can_evaluate_in_background
from server_app.callbacks.base import Callback, Callbacks
from server_app.callbacks.checkpoints import Checkpoints
from server_app.callbacks.collapse import Collapse, CollapseReports
from server_app.callbacks.delivery import Delivery
from server_app.callbacks.early_stopping import EarlyStop
from server_app.callbacks.evaluation import Evaluation
from server_app.callbacks.lines import Costs, Lines, Progress, Tracking
from server_app.callbacks.personalized import Personalized
from server_app.callbacks.results import Results
from server_app.callbacks.snapshots import Snapshots
from server_app.callbacks.summary import Summary
from server_app.client_states import ClientStates
from server_app.console import PlainConsole
from server_app.fleet_file import FleetFile
from server_app.messaging import ClientMessenger
from server_app.nodes import ClientManager
from server_app.run_folder import RunFolder
from server_app.trackers.base import SafeTracker


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
    method = components.method
    if background and settings.evaluation.every:
        # Not a copy, which would share the active stages with the method.
        method = build_method(settings.model).to(components.context.device)
    recorded = InBackground(
        [
            Evaluation(components.evaluator, method),
            CollapseReports(path),
            Lines(path, folder.lines),
            Tracking(tracker, recording),
            Progress(screen, rounds=settings.rounds),
            Checkpoints(folder, states, recording, rounds=settings.rounds),
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
        callbacks.append(Delivery(grid, components, clients, path, fleet))
    if settings.evaluation.personalized:
        callbacks.append(Personalized(ClientMessenger(grid), components, path))
    callbacks.append(Summary(folder, settings, tracker, few_images=few_images, started=started))
    return Callbacks(callbacks)
