"""The ServerApp: build, train, finish. It is the same on every engine.

Flower's run config contains the overrides of the command line, see `overrides_of`.
"""

import logging
import shlex
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedssl.atomic_files import new_run_folder
from fedssl.config.literal import literal_values
from fedssl.config.load import load_settings, with_run_folder
from fedssl.config.overrides import parse, quote_value
from fedssl.config.saved_run import resume_command
from fedssl.config.settings import Settings
from fedssl.errors import InputError
from fedssl.evaluation.protocol import evaluation_problem
from fedssl.evaluation.scores import format_table, mean_over_models
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_layers, load_layers
from fedssl.runs.run_report import RunReport
from fedssl.schedule.stages import set_active_stages
from fedssl.wire.records import encode_arrays, record_bytes
from fedssl.wire.wire_format import describe_wire_format
from server_app.build import RunComponents, build_run
from server_app.checkpoint import StateSchema
from server_app.client_models import ClientModels
from server_app.console import disk_errors_as_run_error, log_to, make_screen
from server_app.delivery import EncoderSender
from server_app.devices import NO_SERVER_DATA
from server_app.evaluator import ResultsByModel
from server_app.initial_weights import store_initial_weights
from server_app.messaging import MessageExchange
from server_app.nodes import federation_size
from server_app.personalization import evaluate_personalized
from server_app.recorder import Recorder
from server_app.teacher import restore_teacher
from server_app.training_loop import (
    TrainingLoop,
    arrays_by_model,
    can_evaluate_in_background,
    load_each,
)
from server_app.virtual_time import VirtualTimeExchange
from strategies.types import ServerState

log = logging.getLogger("fedssl")

# Without one of these overrides the federation defines the number of clients.
SETS_NUM_CLIENTS = {"num_clients", "experiment", "resume"}

RunConfig = Mapping[str, bool | float | int | str]

app = ServerApp()

# Flower accepts only keys with a default in pyproject.toml. An empty one leaves the setting unchanged.
RUN_CONFIG_KEYS = {
    "experiment": "experiment",
    "strategy": "strategy",
    "method": "method",
    "regularizer": "regularizer",
    "schedule": "schedule",
    "encoder": "encoder",
    "dataset": "dataset",
    "dataset-path": "dataset.path",
    "partition": "partition",
    "partition-alpha": "partition.alpha",
    "num-clients": "num_clients",
    "clients-per-round": "clients_per_round",
    "num-server-rounds": "rounds",
    "local-epochs": "local_epochs",
    "batch-size": "batch_size",
    "optimizer-lr": "optimizer.lr",
    "precision": "precision",
    "device": "device",
    "seed": "seed",
    "output-dir": "output_dir",
    "resume": "resume",
}


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Compose the settings from Flower's run config, and run. Reports are for the command that follows the log."""

    def print_report(report: RunReport) -> None:
        print(report.line(), flush=True)

    try:
        settings = load_run_config(grid, context.run_config)
        execute(grid, settings, on_start=lambda folder: print_report(RunReport(run_folder=str(folder))))
    except InputError as error:
        print_report(RunReport(error=str(error)))
        logging.getLogger("flwr").addFilter(without_traceback)
        raise


def without_traceback(record: logging.LogRecord) -> bool:
    """Replace the traceback of an `InputError` by its sentence. Flower logs the exception that ends a ServerApp."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, InputError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}", (), None
    return True


def load_run_config(grid: Grid, run_config: RunConfig) -> Settings:
    """Return the settings of a run config; the federation defines the number of clients if no override does."""
    overrides = overrides_of(run_config)
    settings = load_settings(overrides)
    if not SETS_NUM_CLIENTS & {override.key_or_group for override in parse(overrides)}:
        size = federation_size(grid, timeout=settings.reply_timeout)
        if size not in (None, settings.num_clients):
            settings = load_settings([f"num_clients={size}", *overrides])  # others depend on it
            log.warning("num_clients=%d, as many as the federation has nodes", size)
    return settings if settings.recording.folder else with_run_folder(settings, new_run_folder())


def execute(
    grid: Grid,
    settings: Settings,
    *,
    on_start: Callable[[Path], None] = lambda folder: None,
    terminal: bool = False,
    client_cores: int | None = None,
) -> None:
    """Run all rounds. The reason for an early end is in ``summary.json``.

    ``on_start`` is called with the run folder once all settings are valid. ``terminal`` allows a progress bar, because
    nothing else writes to standard output. Clients use ``client_cores`` cores of this machine; None if unknown.
    """
    screen = make_screen(terminal=terminal)
    recorder = Recorder(settings.recording, rounds=settings.rounds, screen=screen)
    with disk_errors_as_run_error(recorder.folder), recorder.locked(), log_to(recorder.folder, screen), closing(screen):
        screen.open(settings.rounds)
        try:
            outcome = run(
                grid,
                settings,
                recorder,
                client_cores=client_cores,
                on_start=lambda: on_start(recorder.folder),
            )
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
            reason = str(error) or type(error).__name__
            if interrupted:  # Flower's process exits when the SuperLink stops the run
                reason = "stopped by the " + ("user" if isinstance(error, KeyboardInterrupt) else "SuperLink")
            resumed = settings.recording.resumed is not None
            if not (
                resumed and isinstance(error, InputError)
            ):  # settings of the resumption were refused, the run is unchanged
                with suppress(OSError):  # the disk may be full
                    recorder.summary("interrupted" if interrupted else "failed", reason=reason)
            raise
        if outcome is None:
            recorder.summary("paused", reason=f"paused after round {settings.pause_after} of {settings.rounds}")
            log.info("paused after round %d; continue with: %s", settings.pause_after, resume_command(recorder.folder))
            return
        results, models, no_evaluation_reason = outcome
        recorder.summary("finished", final=results, models=models)
        table = format_table(results) if results else f"nothing was evaluated: {no_evaluation_reason}"
        log.info("%s\nresults are in %s", table, recorder.folder)


def run(
    grid: Grid, settings: Settings, recorder: Recorder, *, client_cores: int | None, on_start: Callable[[], None]
) -> tuple[ResultsByModel, ResultsByModel, str | None] | None:
    """Run all rounds after the last checkpoint. Return the results of `finish`, and why nothing is evaluated.

    Return None if the run is paused.
    """
    components = build_run(grid, settings, known_client_ids=recorder.devices())
    settings = components.settings
    resumed = settings.recording.resumed
    server = components.federation.strategy.server
    recorder.store_base(components.federation.base, digest=components.federation.base_digest)
    state = ServerState(models=ClientModels(recorder.folder, {}) if server.models_per_client else {})
    if resumed is not None:
        context, client_ids = components.context, components.client_manager.clients.client_ids
        state = recorder.restore(
            StateSchema(
                untrained=context.initial_model(),
                clients=max([settings.num_clients, *(number + 1 for number in client_ids.values())]),
                phases=len(context.phases),
                models_per_client=server.models_per_client,
                model_state_type=server.model_state_type,
                strategy_state_type=server.strategy_state_type,
            )
        )
        restore_teacher(components.method, state)
    recorder.start_run(settings.recording, components.client_data)
    store_initial_weights(settings, recorder.folder)
    recorder.register(components.client_manager.clients)
    server.plot(recorder.folder / "figures")
    images = f"{len(components.client_data.image_data.images)} images" if components.client_data else "their own images"
    log.info(
        "%d clients, %s, %d rounds; %d bytes of layers per model and direction; output in %s",
        *(settings.num_clients, images, settings.rounds),
        *(record_bytes(encode_arrays(exchanged_layers(components.method), settings.wire_dtype)), recorder.folder),
    )
    if resumed is not None and state.round >= settings.rounds:
        log.info("the run is complete; only its final evaluation is repeated (more rounds: rounds=%d)", state.round + 1)
    on_start()
    log.info("strategy %s: %s", settings.recording.choices["strategy"], describe_exchange(components))
    problem = NO_SERVER_DATA if settings.data.federated is None else evaluation_problem(settings.data)
    if problem:
        log.warning("nothing will be evaluated: %s", problem)
    exchange = make_exchange(grid, components, recorder)
    exchange.restore(state.in_flight)
    background = can_evaluate_in_background(components, client_cores)
    delivers = components.client_data is None and settings.engine.deliver_every is not None
    sender = EncoderSender(settings) if delivers else None

    def deliver(state: ServerState, *, ends: bool = False) -> None:
        if sender is not None and (ends or sender.due(state.round)):
            clients = components.client_manager.clients
            quality = sender.send(grid, clients, state, export_encoders(components, state, recorder))
            if quality is not None:
                recorder.register_quality(quality)

    loop = TrainingLoop(exchange, components, state, recorder, background=background, deliver=deliver)
    state = loop.run()
    if loop.paused:
        return None
    results_by_model = finish(components, state, settings, recorder)
    with set_active_stages(components.method, depth=components.context.phases[-1].depth):
        deliver(state, ends=True)
    if settings.evaluation.personalized:
        trained, epochs = recorder.trained_clients(), settings.evaluation.adaptation_epochs
        with set_active_stages(components.method, depth=components.context.phases[-1].depth):
            recorder.personalized(evaluate_personalized(exchange, components, state, trained=trained, epochs=epochs))
    return (*results_by_model, problem)


def make_exchange(grid: Grid, components: RunComponents, recorder: Recorder) -> MessageExchange:
    """Return the exchange of messages, in virtual or in wall-clock time."""
    if components.virtual_time is not None:
        return VirtualTimeExchange(grid, components.virtual_time)
    if components.client_data is None:  # devices
        keep_contents = components.settings.aggregation.buffered
        return MessageExchange(grid, keep_contents=keep_contents, on_activity=recorder.register_activity)
    return MessageExchange(grid)


def describe_exchange(components: RunComponents) -> str:
    """Describe what clients and server exchange, and which metrics a client reports."""
    settings, federation = components.settings, components.federation
    summary = federation.strategy.describe_communication(components.method)
    metrics = dict.fromkeys([*summary.required_metrics, *settings.algorithm.reported_metrics])
    staged = ""
    if len(components.context.phases) > 1:
        frozen = "all frozen stages, which calibration changes" if settings.calibration else "frozen stages it lacks"
        staged = f"; of the encoder, upload the trained stages, download these and {frozen}"
    if federation.base:
        num_bytes = record_bytes(encode_arrays(federation.base))
        staged += f"; base layers, which tuning={settings.model.tuning.name} freezes, once: {num_bytes} bytes"
    return (
        f"download {summary.download}; upload {summary.upload}; metrics {', '.join(metrics) or 'none'}; "
        f"local {summary.local_state}; wire format {describe_wire_format(settings.wire_dtype)}{staged}"
    )


def export_encoders(components: RunComponents, state: ServerState, recorder: Recorder) -> dict[str, Path]:
    """Write the encoder of every model into the run folder; return the files by name of the model."""
    method, files = components.method, {}
    for name, layers in arrays_by_model(components.context, state).items():
        load_layers(method, layers)
        files[name] = recorder.encoder(name, method, components.settings, rounds=state.round)
    return files


def finish(
    components: RunComponents, state: ServerState, settings: Settings, recorder: Recorder
) -> tuple[ResultsByModel, ResultsByModel]:
    """Export and draw the results. Return the final comparison, and the results of every model."""
    method = components.method
    with set_active_stages(method, depth=components.context.phases[-1].depth):
        models = arrays_by_model(components.context, state)
        untrained = build_method(settings.model).to(components.context.device)
        baselines = components.evaluator.baselines(untrained)
        results_by_model = components.evaluator.evaluate(load_each(method, models), final=True)
        export_encoders(components, state, recorder)
    recorder.figures(components.client_data)
    if not baselines:  # no labeled images
        return {}, {}
    federated = mean_over_models(list(results_by_model.values()))
    return {
        "untrained": baselines["untrained"],
        "federated": federated,
        "pixels": baselines["pixels"],
    }, results_by_model


def overrides_of(run_config: RunConfig) -> list[str]:
    """Return the overrides of a run config. Those of its key ``overrides`` come last and take precedence."""
    flat = [
        f"{RUN_CONFIG_KEYS[key]}={quote_value(value) if isinstance(value, str) else value}"
        for key, value in run_config.items()
        if key in RUN_CONFIG_KEYS and value != ""
    ]
    return literal_values([*flat, *shlex.split(str(run_config.get("overrides", "")))])
