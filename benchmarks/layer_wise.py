"""Cost of a client under each schedule, and as counted by LW-FedSSL's authors (`benchmarks.paper_costs`).

    uv run python benchmarks/layer_wise.py [--batch 256] [--blocks 12] [--sampled 1 4 8 12] [--device cpu] [--threads 2]

The experiments of these names in conf/experiment/lw_fedssl (ViT-Tiny, MoCo v3 with LW-FedSSL's heads, AdamW, the
paper's number of rounds per block), on random images of 32x32:

memory   Peak of the tensors of a training step in the worst stage, see `fedssl.step_cost`.
FLOPs    Of a training step, counted by torch, mean over stages.
time     Of a training step, mean over stages. The number of steps in a round does not depend on the schedule.
bytes    Of all messages to and from a client that takes part in every round, and of the encoder in them.

Stages that are not in ``--sampled`` are interpolated. All numbers are relative to fedmoco, which trains end to end.
``*`` marks a missed target: memory at most 0.25 for fedmoco_lw and 0.30 for lw_fedssl, time at most 0.50 for both.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass, replace

from fedssl.datasets.images import TensorImages
from fedssl.machine.process import OPENMP_ENV, set_allocator_thresholds

os.environ.update(OPENMP_ENV | os.environ)  # before torch is imported, as the command fedssl does

import numpy as np
import torch
from flwr.clientapp import ClientApp

from benchmarks.common import make_parser
from benchmarks.paper_costs import paper_bytes, paper_flops
from fedssl.config.load import compose
from fedssl.config.settings import Settings
from fedssl.machine.devices import select_device
from fedssl.methods.base import SSLMethod, build_method
from fedssl.model_arrays import exchanged_layers
from fedssl.schedule.phases import Phase, make_phases, phase_at
from fedssl.schedule.stages import set_active_stages
from fedssl.step_cost import step_cost
from fedssl.training import LocalTrainer, train
from fedssl.wire.messages import ARRAYS, ClientUpdate, TrainPlan
from fedssl.wire.records import content_bytes, record_to_arrays
from server_app.federation import Federation
from server_app.nodes import ClientDirectory
from server_app.round import Round
from simulation.grid import LocalGrid
from strategies.run_context import RunContext
from strategies.types import GLOBAL, GlobalModel, ServerState

SCHEDULES = ("fedmoco", "fedmoco_lw", "lw_fedssl", "prog_fedssl")
PAPER_MEMORY = dict(zip(SCHEDULES, (1.0, 0.25, 0.30, 1.0), strict=True))  # measured by the authors, Table 3
MEMORY, TIME = {"fedmoco_lw": 0.25, "lw_fedssl": 0.30}, {"fedmoco_lw": 0.5, "lw_fedssl": 0.5}  # targets
ROUNDS_PER_STAGE = 15

WHY = """
FLOPs: the paper counts the frozen blocks for each network; here they run once for all networks and for alignment.
Memory: heads, gradients, optimizer state and the target network do not depend on the number of frozen blocks, which
dominates for small batches.
Bytes: heads are exchanged in every round; the paper omits them. The encoder includes the patch embedding and the last
normalization, and a layer-wise client downloads each block again, after its last aggregation, when the next stage
begins."""


@dataclass(frozen=True)
class Cost:
    """Of a training step: peak bytes, and FLOPs and seconds per image."""

    memory: int
    flops: float
    seconds: float


def measure(settings: Settings, method: SSLMethod, stage: Phase, options: argparse.Namespace) -> Cost:
    """Return the cost of a step in a stage."""
    images = torch.randint(0, 256, (options.batch, 3, 32, 32), dtype=torch.uint8, device=options.device)
    prepared = LocalTrainer.build(settings.training, method)
    training = replace(prepared, precision=options.precision, clip_norm=None, channels_last=False)

    def seconds(steps: int, num_images: int) -> float:
        start = time.perf_counter()
        repeated, generator = replace(training, epochs=steps, batch_size=num_images), torch.Generator().manual_seed(0)
        train(method, TensorImages(images), torch.arange(num_images), training=repeated, generator=generator)
        return (time.perf_counter() - start) / (steps * num_images)  # reading the loss waits for a GPU

    with set_active_stages(method, depth=stage.depth, frozen=stage.frozen):
        cost = step_cost(method, images=images, training=training)
        seconds(1, 2)  # creates the optimizer state
        times = [seconds(options.steps, options.batch) for _ in range(options.turns)]
    return Cost(cost.peak_memory, cost.flops_per_image, statistics.median(times))


def over_stages(costs: dict[int, Cost]) -> Cost:
    """Return the memory of the worst stage, and the means of the other costs over all stages."""
    sampled = sorted(costs)
    every = range(1, sampled[-1] + 1)
    flops = np.interp(every, sampled, [costs[number].flops for number in sampled])
    seconds = np.interp(every, sampled, [costs[number].seconds for number in sampled])
    return Cost(max(cost.memory for cost in costs.values()), float(flops.mean()), float(seconds.mean()))


def traffic(settings: Settings, method: SSLMethod, schedule: list[Phase]) -> np.ndarray:
    """Return the bytes of all messages to and from a client, and of the encoder's layers in them."""
    layers = exchanged_layers(method)
    grid = LocalGrid(ClientApp(), num_clients=1)  # for messages that are not sent
    context = RunContext(
        settings=settings, method=method, phases=schedule, clients_per_round=1, client_config=settings.client_yaml
    )
    directory = ClientDirectory(nodes=dict(enumerate(grid.get_node_ids())))
    # Without the calibration, because bytes do not depend on values.
    federation = Federation(context=context, strategy=settings.algorithm.strategy.instantiate(), directory=directory)
    state, total = ServerState(), np.zeros(2)
    for number in range(1, settings.rounds + 1):
        (message,) = Round(federation, state).messages
        phase, plan = phase_at(schedule, number), TrainPlan.from_content(message.content)
        trained = context.stages.trained(phase, layers)
        update = ClientUpdate(layers={name: layers[name] for name in trained}, partition_id=0, num_examples=1)
        for content in (message.content, update.to_content(plan)):
            arrays = record_to_arrays(content.array_records[ARRAYS])
            encoder = sum(array.nbytes for name, array in arrays.items() if name.startswith("encoder."))
            total += content_bytes(content), encoder
        model = GlobalModel(layers=layers, phase=phase.number)
        state = ServerState(round=number, models={GLOBAL: model}, last_participation={0: (number, GLOBAL)})
    return total


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    set_allocator_thresholds()
    name = torch.cuda.get_device_name() if options.device.type == "cuda" else f"CPU, {options.threads} threads"
    print(f"torch {torch.__version__}, {name}, {options.blocks} blocks, batch {options.batch}, {options.precision}\n")
    overrides = ["num_clients=1", f"encoder.depth={options.blocks}", f"rounds={ROUNDS_PER_STAGE * options.blocks}"]
    settings = {way: compose([f"experiment=lw_fedssl/{way}", *overrides]) for way in SCHEDULES}
    method = build_method(settings["fedmoco"].model).to(options.device)
    schedules = {way: make_phases(settings[way].model.schedule, stages=options.blocks) for way in SCHEDULES}

    measured: dict[tuple[int, int, str], Cost] = {}
    results = {}
    for way in SCHEDULES:
        costs = {}
        for stage in schedules[way]:
            if stage.depth in options.sampled:
                # The last stage of prog_fedssl equals fedmoco's, and its first stage fedmoco_lw's.
                key = stage.depth, stage.frozen, settings[way].training.regularizer.target
                if key not in measured:
                    measured[key] = measure(settings[way], method, stage, options)
                cost = costs[stage.number] = measured[key]
                print(
                    f"{way:11s}  {stage.depth:2d} blocks, {stage.frozen:2d} frozen: {cost.memory / 2**20:7.0f} MiB"
                    f"  {cost.flops / 1e9:6.3f} GFLOPs per image  {1000 * cost.seconds:7.2f} ms per image",
                    flush=True,
                )
        results[way] = over_stages(costs)
    table(settings, method.to("cpu"), schedules, results)


def table(
    settings: dict[str, Settings], method: SSLMethod, schedules: dict[str, list[Phase]], results: dict[str, Cost]
) -> None:
    """Print all costs relative to fedmoco, and as counted in the paper."""
    print("\n             measured                                                  as the paper counts")
    print("             memory   FLOPs   time    bytes (GiB)  of the encoder      memory  FLOPs (x 1e10)  bytes")
    ours, papers = {}, {}
    for way, schedule in schedules.items():
        ours[way] = traffic(settings[way], method, schedule)
        aligned = settings[way].training.regularizer.name == "Alignment"
        flops = paper_flops(method, schedule, image=torch.zeros(1, 3, 32, 32), aligned=aligned)
        papers[way] = flops, sum(paper_bytes(method, schedule, calibrated=settings[way].calibration is not None))
        memory = results[way].memory / results[SCHEDULES[0]].memory
        seconds = results[way].seconds / results[SCHEDULES[0]].seconds
        both, encoder = ours[way] / ours[SCHEDULES[0]]
        paper_ratio, bytes_ratio = (mine / whole for mine, whole in zip(papers[way], papers[SCHEDULES[0]], strict=True))
        print(
            f"{way:11s}  {memory:6.2f}{mark(memory, MEMORY.get(way))}"
            f" {results[way].flops / results[SCHEDULES[0]].flops:6.2f} {seconds:6.2f}{mark(seconds, TIME.get(way))}"
            f" {both:7.2f} {f'({ours[way][0] / 2**30:.1f})':>7s}  {encoder:14.3f}"
            f"      {PAPER_MEMORY[way]:6.2f} {paper_ratio:6.2f} {f'({flops / 1e10:.2f})':>8s} {bytes_ratio:6.3f}"
        )
    print(WHY)


def mark(value: float, target: float | None) -> str:
    return "*" if target is not None and value > target else " "


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--sampled", type=int, nargs="+", default=[], help="measured stages, as numbers of blocks")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=1, help="number of timings, of which the median is used")
    parser.add_argument("--steps", type=int, help="training steps per timing; default: 1 on a CPU, 20 on a GPU")
    options = parser.parse_args()
    options.device = select_device(options.device)
    options.steps = options.steps or (20 if options.device.type == "cuda" else 1)
    thirds = {max(1, round(part * options.blocks / 3)) for part in (1, 2)}
    options.sampled = sorted({*(options.sampled or thirds), 1, options.blocks})
    return options


if __name__ == "__main__":
    main()
