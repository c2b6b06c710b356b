"""The ServerApp: build, train, finish. It is the same on every engine.

Flower's run config contains the overrides of the command line, see `overrides_of`.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedssl.atomic_files import new_run_folder
from fedssl.config.literal import literal_values
from fedssl.config.load import load_settings
from fedssl.config.overrides import parse, quote_value, split_words
from fedssl.config.settings import Settings
from fedssl.errors import InputError, RunError
from fedssl.logs import log
from fedssl.model_arrays import exchanged_layers
from fedssl.runs.run_report import report_line
from fedssl.wire.records import EXACT, record_bytes
from server_app.build import RunComponents, build_run, node_names
from server_app.callbacks.order import make_callbacks
from server_app.client_states import ClientStates
from server_app.console import disk_errors_as_run_error, log_to, log_to_console, make_screen
from server_app.evaluator import missing_evaluations
from server_app.fleet_file import FleetFile, read_device_ids
from server_app.grid_internals import answer_for_unreadable_replies
from server_app.messaging import no_activity
from server_app.nodes import ClientManager, federation_size
from server_app.run_folder import RunFolder, check_new
from server_app.statistics import with_statistics
from server_app.training_loop import TrainingLoop
from strategies.types import ServerState

# Without one of these overrides the federation defines the number of clients.
SETS_NUM_CLIENTS = {"num_clients", "experiment", "resume"}

RunConfig = Mapping[str, bool | float | int | str]

app = ServerApp()

# Flower accepts only keys with a default in pyproject.toml. An empty one leaves the setting unchanged.
RUN_CONFIG_KEYS = {"num-server-rounds": "rounds"} | {
    re.sub("[._]", "-", setting): setting
    for settings in (
        "experiment strategy method regularizer schedule encoder dataset dataset.path partition partition.alpha",
        "num_clients clients_per_round local_epochs batch_size optimizer.lr precision device seed output_dir resume",
    )
    for setting in settings.split()
}


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Compose the settings from Flower's run config, and run. Reports are for the command that follows the log."""
    answer_for_unreadable_replies()
    try:
        with log_to_console() as records:
            settings = load_for_federation(grid, overrides_of(context.run_config))
            components = build_new(grid, settings)
        if settings.recording.folder is None:
            components = components.in_folder(new_run_folder())
        execute(
            grid,
            components,
            records=records,
            on_start=lambda folder: print(report_line(run_folder=str(folder)), flush=True),
        )
    except (InputError, RunError) as error:
        if isinstance(error, InputError):
            print(report_line(error=str(error)), flush=True)
        logging.getLogger("flwr").addFilter(without_traceback)
        raise


def without_traceback(record: logging.LogRecord) -> bool:
    """Replace the traceback of an error for users by its sentence. Flower logs the exception that ends a ServerApp."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, InputError | RunError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}", (), None
    return True


def load_for_federation(grid: Grid, overrides: Sequence[str]) -> Settings:
    """Return the settings of overrides; the federation defines the number of clients if no override does."""
    settings = load_settings(overrides)
    if not SETS_NUM_CLIENTS & {override.key_or_group for override in parse(overrides)}:
        size = federation_size(grid, timeout=settings.reply_timeout)
        if size not in (None, settings.num_clients):
            settings = load_settings([f"num_clients={size}", *overrides])  # others depend on it
            log.warning("num_clients=%d, as many as the federation has nodes", size)
    return settings


def build_new(grid: Grid, settings: Settings) -> RunComponents:
    """Build a run before its folder is made; raises `InputError` for everything that it cannot be run with."""
    recording = settings.recording
    check_new(recording)
    recording.tracker.instantiate()  # reports a missing package
    device_ids = {} if recording.folder is None else read_device_ids(recording.folder)
    return with_statistics(build_run(grid, settings, known_client_ids=device_ids), lambda: grid)


def execute(
    grid: Grid,
    components: RunComponents,
    *,
    records: Sequence[logging.LogRecord] = (),
    on_start: Callable[[Path], None] = lambda folder: None,
    terminal: bool = False,
    client_cores: int | None = None,
) -> None:
    """Run all rounds. The reason for an early end is in ``summary.json``.

    ``records`` were logged before. ``on_start`` is called with the run folder before the first round. ``terminal``
    allows a progress bar, because nothing else writes to standard output. Clients use ``client_cores`` cores of this
    machine; None if unknown.
    """
    settings, screen, started = components.settings, make_screen(terminal=terminal), time.monotonic()
    folder = RunFolder(settings.recording, rounds=settings.rounds)
    log_to_folder = log_to(folder.path, screen, earlier=records)
    on_disk_error = disk_errors_as_run_error(folder.path, check_place=folder.check_place)
    with on_disk_error, folder.locked(), log_to_folder, closing(screen):
        screen.open(settings.rounds)
        states, fleet = ClientStates(folder.path, settings.recording.max_state_bytes), FleetFile(folder.path)
        clients = ClientManager(
            grid,
            components.federation.directory,
            timeout=settings.reply_timeout,
            node_names=node_names(settings),
        )
        callbacks = make_callbacks(
            grid, components, folder, states, clients, fleet, screen=screen, client_cores=client_cores, started=started
        )
        with callbacks.running() as end:
            state = folder.start(components)
            fleet.register(components.federation.directory)
            components.federation.strategy.server.plot(folder.path / "figures")
            log_start(components, state, folder.path)
            on_start(folder.path)
            log_algorithm(components)
            is_deployment = components.context.is_deployment
            exchange = components.make_exchange(grid, fleet.register_activity if is_deployment else no_activity)
            exchange.restore(state.in_flight, settings=components.context.client_config)
            callbacks.on_run_start(state)
            TrainingLoop(exchange, components, state, callbacks, states, clients, fleet).run(end)


def log_start(components: RunComponents, state: ServerState, folder: Path) -> None:
    """Log the size of the run."""
    settings, data = components.settings, components.client_data
    images = "their own images"
    if data:
        held, count = sum(map(len, data.parts)), len(data.image_data.images)
        images = f"{count} images" if held == count else f"{held} of {count} images"
    log.info(
        "%d clients, %s, %d rounds; %d bytes of layers per model and direction; output in %s",
        settings.num_clients,
        images,
        settings.rounds,
        record_bytes(components.context.codec.encode(exchanged_layers(components.method))),
        folder,
    )
    if settings.recording.resumed is not None and state.round >= settings.rounds:
        log.info("the run is complete; only its final evaluation is repeated (more rounds: rounds=%d)", state.round + 1)


def log_algorithm(components: RunComponents) -> None:
    """Log what is exchanged, and which evaluations have no images."""
    settings = components.settings
    log.info("strategy %s: %s", settings.recording.choices["strategy"], describe_exchange(components))
    missing = missing_evaluations(settings)
    for problem in dict.fromkeys(missing.values()):
        names = [name for name, other in missing.items() if other == problem]
        log.warning("%s will have no results: %s", " and ".join(names), problem)


def describe_exchange(components: RunComponents) -> str:
    """Describe what clients and server exchange, and which metrics a client reports."""
    settings, federation = components.settings, components.federation
    summary = federation.strategy.describe_communication(components.method)
    metrics = dict.fromkeys([*summary.required_metrics, *settings.algorithm.reported_metrics])
    staged = ""
    if len(components.context.phases) > 1:
        frozen = "all frozen stages, which calibration changes" if settings.calibration else "frozen stages it lacks"
        staged = f"; of the encoder, upload the trained stages, download these and {frozen}"
    if components.context.base:
        num_bytes = record_bytes(EXACT.encode(components.context.base))
        staged += f"; base layers, which tuning={settings.model.tuning.name} freezes, once: {num_bytes} bytes"
    return (
        f"download {summary.download}; upload {summary.upload}; metrics {', '.join(metrics) or 'none'}; "
        f"local {summary.local_state}; wire format {components.context.codec.describe()}{staged}"
    )


def overrides_of(run_config: RunConfig) -> list[str]:
    """Return the overrides of a run config. Those of its key ``overrides`` come last and take precedence."""
    flat = [
        f"{RUN_CONFIG_KEYS[key]}={quote_value(value) if isinstance(value, str) else value}"
        for key, value in run_config.items()
        if key in RUN_CONFIG_KEYS and value != ""
    ]
    return literal_values([*flat, *split_words("overrides", str(run_config.get("overrides", "")))])
