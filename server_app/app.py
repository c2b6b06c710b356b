"""The ServerApp: prepare, rounds, finish; the same on every engine.

The run config has one key, ``overrides``: the words of the command line.
"""

import logging
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedssl.config import load_run
from fedssl.datasets.base import Pictures, load_federated
from fedssl.errors import InputError
from fedssl.evaluation.scores import Score
from fedssl.fingerprint import code_fingerprint
from fedssl.layers import Layers
from fedssl.machine.devices import pick_device
from fedssl.machine.threads import tune_allocator
from fedssl.methods.base import SSLMethod
from fedssl.methods.build import build
from fedssl.model_layers import load_layers, travelling_layers
from fedssl.partition import split
from fedssl.report.accuracy_table import format_table
from fedssl.schedule.lr import LRSchedule
from fedssl.schedule.phases import make_phases
from fedssl.schedule.stages import at_stage
from fedssl.schedule.stages import check as check_phases
from fedssl.settings import Settings
from fedssl.training import LocalTraining
from fedssl.words import quote
from server_app.calibration import Calibration
from server_app.checkpoint import saved_rounds
from server_app.costs import Costs
from server_app.evaluator import Evaluator
from server_app.federation import Federation
from server_app.monitor import Monitor
from server_app.nodes import find_nodes
from server_app.recorder import Recorder, logging_to
from server_app.round import run_round
from strategies.base import Circumstances, FedSSLStrategy
from strategies.server_optimizer import ServerOptimizer
from strategies.state import ServerState

log = logging.getLogger("fedssl")

Results = dict[str, dict[str, Score]]

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Compose the settings and run all rounds; what ends the run early is in ``summary.json``."""
    words = shlex.split(str(context.run_config["overrides"]))
    settings = load_run(words)
    if settings.recording.folder is None:
        folder = Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
        settings = load_run([*words, f"output_dir={quote(str(folder))}"])
    recorder = Recorder(settings.recording, rounds=settings.rounds)
    with recorder.locked(), logging_to(recorder.folder):
        try:
            results = run(grid, settings, recorder)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = "stopped by the user" if interrupted else str(error) or type(error).__name__
            resumed = settings.recording.resumed is not None
            if not (resumed and isinstance(error, InputError)):  # the folder's run is not to blame
                recorder.summary("interrupted" if interrupted else "failed", reason=reason)
            raise
        recorder.summary("finished", final=results)
        log.info("%s\nresults are in %s", format_table(results), recorder.folder)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run works with, found usable before any round.

    Attributes
    ----------
    federation : Federation
    lr_schedule : LRSchedule
    pictures : Pictures
        Of all clients together.
    parts : list of ndarray
        The pictures of each client.
    evaluator : Evaluator
    monitor : Monitor or None
        None: health is not looked at.
    costs : Costs or None
        None: they are not measured.
    """

    federation: Federation
    lr_schedule: LRSchedule
    pictures: Pictures
    parts: list[np.ndarray]
    evaluator: Evaluator
    monitor: Monitor | None
    costs: Costs | None

    @property
    def method(self) -> SSLMethod:
        """The server's own copy, into which models are loaded to be looked at."""
        return self.federation.method


def run(grid: Grid, settings: Settings, recorder: Recorder) -> Results:
    """All rounds from the last checkpoint on; returns the final comparison of encoders."""
    prepared = prepare(grid, settings)
    resumed = settings.recording.resumed
    if resumed not in (None, settings.rounds) and len(prepared.federation.phases) > 1:
        raise InputError(  # they decide which phase a round belongs to
            f"resume={recorder.folder} was run with rounds={resumed} (now {settings.rounds}); leave these as they "
            "were, or start a new run"
        )
    state = ServerState() if resumed is None else recorder.restore()
    recorder.begin(prepared.pictures, prepared.parts)
    log.info(
        "%d clients, %d pictures, %d rounds; %d bytes of layers per client and direction; output in %s",
        *(settings.num_clients, len(prepared.pictures.images), settings.rounds),
        *(sum(array.nbytes for array in travelling_layers(prepared.method).values()), recorder.folder),
    )
    state = rounds(grid, prepared, state, recorder, last=settings.rounds)
    return finish(prepared, state, settings, recorder)


def prepare(grid: Grid, settings: Settings) -> Prepared:
    """Build all parts; raises `InputError` for settings that do not fit each other or the data."""
    torch.set_num_threads(settings.machine.threads)
    if settings.machine.allocator:
        tune_allocator()
    device, seed, data = pick_device(settings.machine.device), settings.seed, settings.data
    strategy: FedSSLStrategy = settings.algorithm.strategy.make()
    server_optimizer: ServerOptimizer = settings.algorithm.server_optimizer.make()
    evaluator = Evaluator(settings.evaluation, data=data, rounds=settings.rounds, device=device, seed=seed)
    method = build(settings.model).to(device)
    evaluator.check(method.encoder)
    strategy.check(
        Circumstances(
            method=method,
            clients_per_round=settings.clients_per_round,
            calibrated=settings.calibration is not None,
            server_optimizer=server_optimizer.steps,
        )
    )
    method.encoder.check_pictures((data.channels, data.size, data.size))
    nodes = find_nodes(grid, settings.num_clients)
    pictures = federated_pictures(settings, method)
    parts = split(settings.partition, pictures)
    training = LocalTraining.prepare(settings.training, method)
    phases = make_phases(settings.model.schedule, stages=len(method.encoder.stage_names))
    check_phases(method, phases)
    lr_schedule = LRSchedule(settings.model.schedule.lr.make(), phases, settings.rounds)
    lr_schedule(1)  # refuses its settings now or never
    calibration = None
    if settings.calibration is not None:
        calibration = Calibration(
            settings.calibration,
            method=method,
            training=LocalTraining.prepare(settings.training, method),
            lr_schedule=lr_schedule,
            data=data,
            device=device,
            seed=seed,
        )
    federation = Federation(
        strategy=strategy,
        method=method,
        phases=phases,
        initial=lambda: travelling_layers(build(settings.model)),
        nodes=tuple(nodes),
        seed=seed,
        clients_per_round=settings.clients_per_round,
        timeout=settings.client_timeout,
        settings=settings.client_text,
        code=code_fingerprint(),
        metrics=settings.algorithm.metrics,
        server_optimizer=server_optimizer,
        calibration=calibration,
    )
    watched = settings.evaluation.health_pictures
    monitor = (
        Monitor(method, data=data, pictures=watched, augment=training.augment, device=device, seed=seed)
        if watched
        else None
    )
    measured = settings.evaluation.resources
    costs = Costs(method, training, pictures=pictures, parts=parts, device=device) if measured else None
    return Prepared(
        federation=federation,
        lr_schedule=lr_schedule,
        pictures=pictures,
        parts=parts,
        evaluator=evaluator,
        monitor=monitor,
        costs=costs,
    )


def rounds(grid: Grid, prepared: Prepared, state: ServerState, recorder: Recorder, *, last: int) -> ServerState:
    """All rounds after ``state`` up to the last one, recorded; returns the state after it."""
    method, evaluator, monitor = prepared.method, prepared.evaluator, prepared.monitor
    while state.round < last:
        start, number = time.monotonic(), state.round + 1
        phase, due = prepared.lr_schedule.phase(number), evaluator.due(number)
        with at_stage(method, depth=phase.depth):
            state, report = run_round(
                grid,
                prepared.federation,
                state,
                lr_factor=prepared.lr_schedule(number),
                keep_from=min(saved_rounds(recorder.folder / "checkpoints"), default=0),
                observe=monitor.observe if monitor and due else None,
            )
            seconds = time.monotonic() - start
            evaluation, health = {}, None
            if due:
                health = monitor.finish(layers_of(state)) if monitor else None
                evaluation = evaluator.evaluate(in_turn(method, layers_of(state)))
        cost = prepared.costs(phase, [row.client for row in report.clients]) if prepared.costs else None
        # The lines go first: lines beyond the newest checkpoint are cut off when a run resumes.
        recorder.round(report, seconds=seconds, evaluation=evaluation, health=health, cost=cost)
        recorder.checkpoint(state)
    return state


def finish(prepared: Prepared, state: ServerState, settings: Settings, recorder: Recorder) -> Results:
    """Compare, export and draw what the rounds have led to."""
    method = prepared.method
    with at_stage(method, depth=prepared.federation.phases[-1].depth):
        models = layers_of(state)
        untrained = build(settings.model).to(pick_device(settings.machine.device))
        results = prepared.evaluator.compare({"untrained": [untrained], "federated": in_turn(method, models)})
        for name, layers in models.items():
            load_layers(method, layers)
            recorder.encoder(name, method, settings)
    recorder.figures(prepared.pictures, prepared.parts)
    return results


def federated_pictures(settings: Settings, method: SSLMethod) -> Pictures:
    """What the clients share; raises `InputError` if the method needs labels that are not there."""
    pictures = load_federated(settings.data)
    if method.uses_labels and pictures.labels is None:
        raise InputError(
            f"{type(method).__name__} needs labels but the pictures of dataset.splits.federated="
            f"{settings.data.federated} have none; choose another dataset, split or method"
        )
    return pictures


def layers_of(state: ServerState) -> dict[str, Layers]:
    """The layers of every model, by name and in order."""
    return {name: state.models[name].layers for name in state.names()}


def in_turn(method: SSLMethod, models: Mapping[str, Layers]) -> Iterator[SSLMethod]:
    """The method with each of the models in it, one after the other."""
    for layers in models.values():
        load_layers(method, layers)
        yield method
