"""The ServerApp: prepare, rounds, finish; the same on every engine.

The run config has one key, ``overrides``: the words of the command line.
"""

import logging
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedssl.config import load_run
from fedssl.errors import InputError
from fedssl.evaluation.scores import Score
from fedssl.layers import Layers
from fedssl.machine.devices import pick_device
from fedssl.methods.base import SSLMethod
from fedssl.methods.build import build
from fedssl.model_layers import load_layers, travelling_layers
from fedssl.report.accuracy_table import format_table
from fedssl.schedule.stages import at_stage
from fedssl.settings import Settings
from fedssl.words import quote
from server_app.checkpoint import saved_rounds
from server_app.prepare import Prepared, prepare
from server_app.recorder import Recorder, logging_to
from server_app.round import run_round
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


def layers_of(state: ServerState) -> dict[str, Layers]:
    """The layers of every model, by name and in order."""
    return {name: state.models[name].layers for name in state.names()}


def in_turn(method: SSLMethod, models: Mapping[str, Layers]) -> Iterator[SSLMethod]:
    """The method with each of the models in it, one after the other."""
    for layers in models.values():
        load_layers(method, layers)
        yield method
