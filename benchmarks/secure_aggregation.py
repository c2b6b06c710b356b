"""Time per phase of secure aggregation, beside Flower's own workflow and mod.

    uv run python benchmarks/secure_aggregation.py
    uv run python benchmarks/secure_aggregation.py --clients 300 1000 --turns 1 --jobs fedssl

Server and clients run in this process, one after the other, and nothing is trained: the update is a random vector of
`--length` float64 values. Every job has the same graph of neighbors, that of the default settings, and the jobs
alternate. `fedssl` masks with ChaCha20, `fedssl mt19937` with Flower's masks. Seconds are medians over the turns, of
wall-clock time and, for all phases, of CPU time.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState

from benchmarks.common import make_parser
from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.secure_aggregation.client import secagg_reply
from fedssl.secure_aggregation.graph import graph_for
from fedssl.secure_aggregation.protocol import PHASES
from fedssl.secure_aggregation.server import secure_mean_delta
from server_app.messaging import ClientMessenger
from simulation.grid import LocalGrid

CPU = "cpu"  # key of the CPU seconds of all phases
Deltas = Callable[[int], np.ndarray]  # the update of a node


def one_image(node: int) -> int:
    return 1


def fedssl_app(delta: Deltas, images: Callable[[int], int] = one_image) -> ClientApp:
    """Return an app with this project's client side, whose training returns update and images of its node."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        layers = {"w": delta(context.node_id)}
        update = SimpleNamespace(layers=layers, num_examples=images(context.node_id))
        pair: Any = SimpleNamespace(layers={"w": np.zeros_like(layers["w"])}), update
        return secagg_reply(message, context, lambda: pair)

    return app


def flower_app(delta: Deltas, images: Callable[[int], int] = one_image) -> ClientApp:
    """Return an app with Flower's mod, whose training returns update and images of its node."""
    app = ClientApp()

    def fit(message: Message, context: Context) -> Message:
        result = FitRes(
            Status(Code.OK, ""), ndarrays_to_parameters([delta(context.node_id)]), images(context.node_id), {}
        )
        return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        configs = {name: ConfigRecord({**record}) for name, record in message.content.config_records.items()}
        message.content = RecordDict({**message.content, **configs})  # Flower's mod removes records
        return secaggplus_mod(message, context, fit)

    return app


def run_fedssl(
    app: ClientApp, clients: int, settings: SecureAggregationSettings, *, length: int
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the mean and the seconds of each phase of this project's server side."""
    grid = LocalGrid(app, num_clients=clients)
    contents = {node: RecordDict() for node in grid.get_node_ids()}
    send = partial(ClientMessenger(grid).send_and_receive, timeout=600)
    result = secure_mean_delta(send, contents, settings, length=length, round=1)
    return result.delta, {name: cost.seconds for name, cost in result.phases.items()}


def run_flower(
    app: ClientApp, clients: int, settings: SecureAggregationSettings, *, length: int
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the mean and the seconds of each phase of Flower's workflow."""
    graph, local, means = graph_for(settings, clients), LocalGrid(app, num_clients=clients), []

    def aggregate_fit(round: int, results: list[Any], failures: object) -> tuple[None, None]:
        means.append(parameters_to_ndarrays(results[0][1].parameters)[0])
        return None, None

    instructions = [(SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in local.get_node_ids()]
    strategy = SimpleNamespace(configure_fit=lambda *_: instructions, aggregate_fit=aggregate_fit)
    records = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: 1}), MAIN_PARAMS_RECORD: ArrayRecord()})
    manager = SimpleNamespace(num_available=lambda: clients)
    context: Any = SimpleNamespace(state=records, strategy=strategy, client_manager=manager, history=None)
    grid: Any = SimpleNamespace(send_and_receive=lambda messages, timeout: list(local.send_and_receive(messages)))
    workflow = SecAggPlusWorkflow(graph.shares, graph.threshold, max_weight=1.0, clipping_range=settings.clipping_range)
    state, seconds = WorkflowState(), {}
    stages = (
        workflow.setup_stage,
        workflow.share_keys_stage,
        workflow.collect_masked_vectors_stage,
        workflow.unmask_stage,
    )
    for name, stage in zip(PHASES, stages, strict=True):
        start = time.monotonic()
        if not stage(grid, context, state):
            raise RuntimeError(f"Flower's workflow stopped in the phase {name}")
        seconds[name] = time.monotonic() - start
    return means[0], seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 40, 100])
    parser.add_argument("--length", type=int, default=375_000)
    parser.add_argument("--turns", type=int, default=3)
    names = ("fedssl", "fedssl mt19937", "Flower")
    parser.add_argument("--jobs", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    vector = np.random.default_rng(0).normal(0, 1e-3, options.length)
    settings = {"fedssl": SecureAggregationSettings(clipping_range=8.0)}
    settings["fedssl mt19937"] = settings["Flower"] = SecureAggregationSettings(
        clipping_range=8.0, mask_generator="mt19937"
    )
    print(f"| clients | neighbors, threshold | job | {' | '.join(PHASES)} | sum | CPU |\n|{'---|' * 9}")
    for clients in options.clients:
        seconds: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _ in range(options.turns):
            for job in options.jobs:
                run, app = (run_flower, flower_app) if job == "Flower" else (run_fedssl, fedssl_app)
                start = time.process_time()
                mean, phases = run(app(lambda node: vector), clients, settings[job], length=options.length)
                assert np.abs(mean - vector).max() < 2 * 8 / 2**22
                seconds[job].append({**phases, CPU: time.process_time() - start})
        graph = graph_for(settings["fedssl"], clients)
        for job, turns in seconds.items():
            medians = [statistics.median(phases[name] for phases in turns) for name in PHASES]
            total = statistics.median(sum(phases[name] for name in PHASES) for phases in turns)
            cpu = statistics.median(phases[CPU] for phases in turns)
            numbers = " | ".join(f"{number:.2f} s" for number in (*medians, total, cpu))
            print(f"| {clients} | {graph.neighbors}, {graph.threshold} | {job} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
