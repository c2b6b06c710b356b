"""The ServerApp: the rounds of a federation, from the settings to the exported encoder.

The same on every engine. The run config has one key, ``overrides``: the words of the command line.
"""

import logging
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from omegaconf import DictConfig, OmegaConf

from fedssl.config import load_run, make
from fedssl.datasets.base import load
from fedssl.errors import InputError
from fedssl.export import save_encoder
from fedssl.fingerprint import code_fingerprint
from fedssl.layers import Layers
from fedssl.machine.devices import pick_device
from fedssl.machine.threads import tune_allocator
from fedssl.messages import from_record, read_who, to_record
from fedssl.methods import SSLMethod, build
from fedssl.model_layers import load_layers, travelling_layers
from fedssl.partition import split
from fedssl.regularizers.base import Regularizer
from fedssl.report import accuracy_table
from fedssl.report.curves import draw_curves
from fedssl.report.partition import draw, write_table
from fedssl.schedule.phases import Phase, phase_at
from fedssl.schedule.stages import Stages, enter
from fedssl.schedule.stages import check as check_schedule
from server_app.calibration import Calibration
from server_app.checkpoint import saved_rounds
from server_app.costs import Costs
from server_app.evaluator import Evaluator
from server_app.monitor import Monitor
from server_app.recorder import Recorder, logging_to
from strategies.base import FedSSLStrategy
from strategies.staging import Staging

log = logging.getLogger("fedssl")

NODE_WAIT = 10.0  # seconds without a new node before the federation counts as complete

# What a client must know; engine, evaluation and tracking are no concern of it.
CLIENT_SETTINGS = [
    *("seed", "num_clients", "dataset", "partition", "augmentation", "encoder", "method", "regularizer"),
    *("schedule", "calibration", "optimizer", "strategy", "local_epochs", "batch_size", "clip_norm"),
    *("precision", "channels_last", "compile"),
    *("device", "threads", "allocator", "output_dir", "run_id"),
]

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Compose the settings and run all rounds; what ends the run early is in ``summary.json``."""
    settings, overrides = load_run(shlex.split(str(context.run_config["overrides"])))
    if settings.output_dir is None:
        settings.output_dir = str(Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S")).resolve())
    recorder = Recorder(settings, overrides)
    with recorder.locked(), logging_to(recorder.folder):
        try:
            results = run(grid, settings, recorder)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = "stopped by the user" if interrupted else str(error) or type(error).__name__
            if not (settings.resume and isinstance(error, InputError)):  # the folder's run is not to blame
                recorder.summary("interrupted" if interrupted else "failed", reason=reason)
            raise
        recorder.summary("finished", final=results)
        log.info("%s\nresults are in %s", accuracy_table.format_table(results), recorder.folder)


def run(grid: Grid, settings: DictConfig, recorder: Recorder) -> dict[str, dict[str, float]]:
    """All rounds from the last checkpoint on; returns the final comparison of encoders."""
    torch.set_num_threads(settings.threads)
    if settings.allocator:
        tune_allocator()
    device = pick_device(settings.device)
    strategy: FedSSLStrategy = make(settings.strategy)
    strategy.server_optimizer = make(settings.server_optimizer)
    evaluator = Evaluator(settings, device)
    evaluator.check()
    method = build(settings).to(device)
    strategy.check(method, clients_per_round=settings.clients_per_round)
    nodes = find_nodes(grid, settings.num_clients)
    pictures = load(settings.dataset, "federated")
    if method.uses_labels and pictures.labels is None:
        raise InputError(
            f"{type(method).__name__} needs labels but the pictures of dataset.splits.federated="
            f"{settings.dataset.splits.federated} have none; choose another dataset, split or method"
        )
    parts = split(settings, pictures)
    regularizer: Regularizer = make(settings.regularizer)
    if regularizer.on not in (None, *(name for name, _ in method.named_children())):
        raise InputError(
            f"{type(regularizer).__name__} works on the {regularizer.on}, which {type(method).__name__} does not have; "
            "set another regularizer or method"
        )
    make(settings.augmentation)  # can they be built?
    make(settings.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    lr_factor = make(settings.lr_schedule)
    schedule = make_schedule(settings, method)
    lr_factor(1, rounds=settings.rounds, stage=schedule[0])
    strategy.staging = make_staging(settings, method, schedule, device)
    checkpoint = recorder.restore() if settings.resume else None
    recorder.begin()
    write_table(recorder.folder / "partition.csv", parts, pictures.labels, pictures.classes)
    done, layers = 0, travelling_layers(method)
    if checkpoint:
        done, layers = checkpoint.round, checkpoint.layers
        strategy.restore(checkpoint.strategy)
    log.info(
        "%d clients, %d pictures, %d rounds; %d bytes of layers per client and direction; output in %s",
        *(settings.num_clients, len(pictures.images), settings.rounds),
        *(sum(array.nbytes for array in layers.values()), recorder.folder),
    )
    strategy.summary()
    config = train_config(settings, nodes)
    monitor = Monitor(settings, method, device)
    costs = Costs(settings, method, pictures, parts, device) if settings.measure_resources else None
    for round in range(done + 1, settings.rounds + 1):
        start = time.monotonic()
        strategy.observe = monitor.observe if evaluator.due(round) else None
        config["keep-from"] = _keep_from(recorder)
        stage = phase_at(schedule, round)
        enter(method, depth=stage.depth)  # in which the monitor sees the clients' models
        config["lr-factor"] = lr_factor(round, rounds=settings.rounds, stage=stage)
        layers = run_round(grid, strategy, round, layers, config=config, timeout=settings.client_timeout)
        seconds = time.monotonic() - start
        evaluation, health = {}, None
        if evaluator.due(round):
            health = monitor.finish(layers)
            evaluation = evaluator.evaluate(in_turn(method, strategy.models(layers)))
        # The lines go first: lines beyond the newest checkpoint are cut off when a run resumes.
        cost = costs(stage, [row.client for row in strategy.report.clients]) if costs else None
        recorder.round(strategy.report, seconds=seconds, evaluation=evaluation, health=health, cost=cost)
        recorder.checkpoint(round, layers, strategy)
    enter(method, depth=schedule[-1].depth)
    models = strategy.models(layers)
    results = evaluator.compare({"untrained": [build(settings).to(device)], "federated": in_turn(method, models)})
    for name, model in models.items():
        load_layers(method, model)
        export(recorder.folder / f"encoder{name}.pt", method, settings)
    draw(recorder.folder / "figures" / "partition.png", parts, pictures.labels, pictures.classes)
    draw_curves(recorder.folder)
    return results


def make_schedule(settings: DictConfig, method: SSLMethod) -> list[Phase]:
    """The stages of the run, which the method's encoder must allow."""
    schedule: list[Phase] = make(settings.schedule)(rounds=settings.rounds, depth=len(method.encoder.stage_names))
    check_schedule(method, schedule)
    return schedule


def make_staging(settings: DictConfig, method: SSLMethod, schedule: list[Phase], device: torch.device) -> Staging:
    """What the strategy does beside aggregating."""
    return Staging(
        Stages(method, schedule) if len(schedule) > 1 else None,
        Calibration(settings, method, schedule, device) if settings.calibration.at else None,
    )


def in_turn(method: SSLMethod, models: Mapping[str, Layers]) -> Iterator[SSLMethod]:
    """The method with each of the models in it, one after the other."""
    for layers in models.values():
        load_layers(method, layers)
        yield method


def train_config(settings: DictConfig, nodes: Sequence[int]) -> ConfigRecord:
    """What `FedSSLStrategy.configure_train` must know beside the layers; same in all rounds but for two keys."""
    return ConfigRecord(
        {
            "seed": settings.seed,
            "clients-per-round": settings.clients_per_round,
            "nodes": list(nodes),
            "settings": OmegaConf.to_yaml(OmegaConf.masked_copy(settings, CLIENT_SETTINGS)),
            "keep-from": 0,
            "lr-factor": 1.0,
            "code": code_fingerprint(),
        }
    )


def run_round(
    grid: Grid, strategy: FedSSLStrategy, round: int, layers: Layers, *, config: ConfigRecord, timeout: float
) -> Layers:
    """One round: plans down, updates up, the new global layers out."""
    messages = strategy.configure_train(round, to_record(layers), config, grid)
    arrays, _ = strategy.aggregate_train(round, receive(grid, messages, timeout=timeout))
    assert arrays is not None  # a strategy of ours raises instead
    return from_record(arrays)


def receive(grid: Grid, messages: Iterable[Message], *, timeout: float) -> Iterator[Message]:
    """Replies as they arrive, until all are there or none has come for ``timeout`` seconds."""
    pending = set(filter(None, grid.push_messages(messages)))  # the id of a message that could not be sent is empty
    deadline = time.monotonic() + timeout
    pause = 0.005
    while pending and time.monotonic() < deadline:
        replies = list(grid.pull_messages(pending))
        if replies:
            pause = 0.005
        else:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        while replies:
            reply = replies.pop()
            pending.discard(reply.metadata.reply_to_message_id)
            yield reply
            del reply  # one model each
            deadline = time.monotonic() + timeout


def find_nodes(grid: Grid, num_clients: int) -> list[int]:
    """Node ids in the order of their partition ids; node ids differ from run to run, partition ids do not.

    Raises
    ------
    InputError
        The federation has another number of nodes than ``num_clients``.
    """
    nodes = _wait_for_nodes(grid, num_clients)
    if len(nodes) != num_clients:
        raise InputError(
            f"num_clients={num_clients} but the federation has {len(nodes)} SuperNodes; "
            f"add --federation-config 'num-supernodes={num_clients}' or set num_clients={len(nodes)}"
        )
    messages = [Message(RecordDict(), node, "query.who") for node in nodes]
    held = {}
    for reply in receive(grid, messages, timeout=60):
        if reply.has_error():
            raise InputError(f"a client cannot start: {reply.error.reason}")
        held[read_who(reply)[0]] = reply.metadata.src_node_id
    if sorted(held) != list(range(num_clients)):
        raise InputError(
            f"the nodes hold the partitions {sorted(held)} but 0 to {num_clients - 1} are needed, each once; "
            "set partition-id and num-partitions in the nodes' configuration"
        )
    return [held[partition] for partition in range(num_clients)]


def export(path: Path, method: SSLMethod, settings: DictConfig) -> None:
    """Write the encoder for use elsewhere."""
    save_encoder(
        path,
        method.encoder,
        settings=OmegaConf.to_container(settings.encoder),
        mean=settings.dataset.mean,
        std=settings.dataset.std,
        metadata={
            "method": settings.method["_target_"].rpartition(".")[2],
            "strategy": settings.strategy["_target_"].rpartition(".")[2],
            "dataset": _dataset_name(settings),
            "rounds": settings.rounds,
            "seed": settings.seed,
        },
    )


def _dataset_name(settings: DictConfig) -> str:
    """Name of the data set: on the Hub, or of the module that reads it."""
    return str(settings.dataset.get("hub") or settings.dataset["_target_"].split(".")[-2])


def _wait_for_nodes(grid: Grid, num_clients: int) -> list[int]:
    nodes = list(grid.get_node_ids())
    last_change = time.monotonic()
    while len(nodes) < num_clients and time.monotonic() - last_change < NODE_WAIT:
        time.sleep(0.05)
        found = list(grid.get_node_ids())
        if len(found) != len(nodes):
            last_change = time.monotonic()
        nodes = found
    return nodes


def _keep_from(recorder: Recorder) -> int:
    """Oldest round that a resumed run may go back to."""
    return min(saved_rounds(recorder.folder / "checkpoints"), default=0)
