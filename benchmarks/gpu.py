"""One prepared check of a GPU in at most eight minutes, on a machine without network, Ray, Hydra and Flower.

    uv run python benchmarks/gpu.py --prepare wheels --data '/my/cifar10-*.parquet'

gathers what that machine lacks, see `gpu_wheels.py`: 19 MB of wheels, and CIFAR-10. Copy this folder to the machine,
with `wheels`, which git should ignore. Its Python is 3.12. There:

    python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site wheels/*.whl
    export PYTHONPATH=/tmp/site
    python3 -m benchmarks.gpu --data 'wheels/*.parquet' --output OUT
    python3 -m benchmarks.gpu --data 'wheels/*.parquet' --output NEW --parts d --continue OUT/checkpoint.0

The output has ``gpu.json``, written after every result, ``gpu.log``, and a checkpoint in files of at most 15 MB. Each
part runs in a separate process, which is stopped after its time budget. A result is a number or a table, or
``unavailable``: not on this device; ``skipped``: no time was left; ``failed``: an error, whose traceback is in the log.
With a failure the exit status is 1. Times are those of an H100.

a. Correctness, 135 s: two rounds on the digits, this device against the CPU: relative error of the loss,
   peak memory. Launches and waits of a step of 32x32 images.
b. Throughput, 160 s: images/s of a client with each setting for GPUs, of the bare loop on cached views
   (the limit), and of the plain loop with torchvision's v2 transforms on the device (one draw for all images of a
   batch) and with a DataLoader of its transforms of PIL images, which lightly uses too, with a worker per core.
c. Processes, 32 s: images/s of 1, 2, 4 and 8 clients that share the device.
d. Learning, the rest, about 4.5 s for a round of both strategies: FedAvg and L-DAWA in the
   setting of L-DAWA's Table 4, alpha 0.1, one local epoch, where they have 50.92 and 60.29 after 200 rounds (FedAvg
   52.90 after 10). Then `evaluation=linear`, which is not the paper's probe. The checkpoint has half precision, since a
   machine may return 64 MB at most. Without CIFAR-10 this part is unavailable.

``--device cpu --small`` runs every part on tiny problems in about a minute.
"""

import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser
from benchmarks.gpu_wheels import prepare
from fedssl.errors import InputError
from fedssl.machine.process import OPENMP_ENV

if __name__ == "__main__":
    os.environ.update(OPENMP_ENV | os.environ)  # before torch is imported, as the command fedssl does

SECONDS = 480  # of the whole run
BUDGETS = {"a": 140, "b": 170, "c": 45, "d": SECONDS}  # seconds in which cases of a part start
GRACE = 15  # seconds until a part is stopped after that
PROBES = 25  # seconds that part d leaves for the evaluation
TOLERANCE = 1e-2  # relative error of a loss: sums in another order change every step
ROUNDS, BLOCK = 200, 5  # rounds of the paper, and rounds of one strategy before those of the other
PROBED = 10  # rounds after which the paper has a row of FedAvg
STRATEGIES = ("fedavg", "l_dawa")

VIT = ["encoder=vit_tiny", "encoder.patch=2", "encoder.width=64", "encoder.depth=4", "encoder.heads=2"]
CORRECTNESS = {
    "simclr": ["method=simclr"],
    "byol": ["method=byol"],
    "dino": ["method=dino", "augmentation=digits_multi_crop"],
    "mae": ["method=mae", "augmentation=digits_mae", *VIT],
    "lora": ["tuning=lora", "tuning.rank=4", "strategy=fedavg", *VIT],
    "layer_wise": ["schedule=layer_wise", "method=moco_v3", "rounds=4", *VIT],  # its second round starts a stage
    "scaffold": ["strategy=scaffold"],
    "feddyn": ["strategy=feddyn"],
    "moon": ["strategy=moon"],
    "sam": ["optimizer=sam"],
    "ssd": ["method=ssd"],
    "fedsc": ["method=fedsc"],
    "mar": ["method=mar", "augmentation=digits_mae", *VIT],
}
DIGITS = [
    "dataset=digits",
    "dataset.limit=64",
    "encoder=conv_small",
    "num_clients=2",
    "local_epochs=1",
    "batch_size=16",
]
DIGITS += ["evaluation=linear"]
TABLE_4 = ["experiment=l_dawa/base", "partition=dirichlet", "partition.alpha=0.1", "local_epochs=1", "precision=bf16"]
TABLE_4 += ["evaluation=linear"]

Attempt = Callable[[str, Callable[[], object]], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a part."""

    device: str
    small: bool
    output: Path
    data: str | None  # pattern of the files of CIFAR-10
    checkpoint: Path | None  # its first file
    strategies: Sequence[str]  # of part d
    end: float = 0.0  # of `time.monotonic`: the last case starts before


def attempt(connection: Connection, end: float, case: str, measure: Callable[[], object]) -> None:
    """Send the result of a case, which may be that it is unavailable, skipped or failed."""
    try:
        result = measure() if time.monotonic() < end else {"skipped": "no time left"}
    except InputError as error:
        result = {"unavailable": str(error)}
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {error}"[:1000]}
    connection.send((case, result))
    gc.collect()


def correctness(options: Options, attempt: Attempt) -> None:
    import torch

    from benchmarks.gpu_throughput import VARIANTS

    torch.backends.cudnn.allow_tf32 = False
    for name, overrides in CORRECTNESS.items():
        attempt(name, partial(compare_with_cpu, options, overrides))
    torch.backends.cudnn.allow_tf32 = True
    encoder = "conv_small" if options.small else "resnet18"
    for method in ("simclr",) if options.small else ("simclr", "byol"):
        for variant, extra in VARIANTS.items():
            chosen = [f"encoder={encoder}", f"method={method}", "batch_size=8", *extra]
            steps = (1, 2) if options.small else (6, 8)
            attempt(f"a step of {method}, {variant}", partial(count_requests, options.device, chosen, steps))


def compare_with_cpu(options: Options, overrides: Sequence[str]) -> dict[str, object]:
    """Return the losses of two rounds, their relative error, and the peak memory; raise an error if it is too large."""
    import torch

    size = DIGITS if options.small else [*DIGITS, "dataset.limit=512", "batch_size=64"]
    losses, peak = {}, None
    for device in ("cpu", options.device):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run = federation(*size, *overrides, f"device={device}")
        losses[device] = [run_rounds(run, 1)["loss"] for _ in range(2)]
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated()
    ours, expected = losses[options.device], losses["cpu"]
    error = max(abs(a - b) / abs(b) for a, b in zip(ours, expected, strict=True))
    if not error < TOLERANCE:
        raise ArithmeticError(f"losses {ours} differ from {expected} on the CPU by {error:.2e}, more than {TOLERANCE}")
    return {"losses": ours, "relative error": error, "peak bytes": peak}


def count_requests(device: str, overrides: Sequence[str], steps: tuple[int, int]) -> dict[str, float]:
    """Return the launches and waits of a training step by the profiles of few and many; on a CPU operations."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.augmentation import clock
    from benchmarks.clients import ours
    from benchmarks.gpu_throughput import make_client

    launch = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch") if device == "cuda" else ("aten::",)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    counts = []
    for number in steps:
        epoch = ours(make_client(device, overrides, steps=number))
        epoch()
        with profile(activities=activities) as measured:
            epoch()
            clock()
        events = [(event.key, event.count) for event in measured.key_averages()]
        launches = sum(count for name, count in events if name.startswith(launch))
        counts.append((launches, sum(count for name, count in events if "Synchronize" in name)))
    (few, few_waits), (many, many_waits) = counts
    step = steps[1] - steps[0]
    name = "launches" if device == "cuda" else "operations"
    return {name: (many - few) / step, "waits": (many_waits - few_waits) / step}


def federation(*overrides: str) -> Any:
    """Return a `Federation` of this process."""
    from benchmarks.local_engine import Federation  # imports torch

    return Federation(*overrides, "strategy.reported_metrics=[train-loss]")


def run_rounds(run: Any, number: int) -> dict[str, Any]:
    """Run rounds; return the number of all, the mean loss of the last one, and the median of their seconds."""
    seconds = [run() for _ in range(number)]
    if run.result.dropped:
        raise ArithmeticError(f"clients without an update: {run.result.dropped}")
    loss = statistics.mean(client.loss for client in run.result.clients)
    return {"round": run.state.round, "loss": loss, "seconds per round": statistics.median(seconds)}


def learning(options: Options, attempt: Attempt) -> None:
    """Train with both strategies in turn until the time ends, and evaluate the last models."""
    if options.data is None and not options.small:
        raise InputError("part d needs CIFAR-10; use --data 'FOLDER/*.parquet'")
    from benchmarks.gpu_checkpoint import load, save

    kernel = "triton" if options.device == "cuda" else "torch"
    setting = DIGITS if options.small else [*TABLE_4, f"dataset.path={options.data}", f"gpu_augmentation={kernel}"]
    runs = {name: federation(*setting, f"device={options.device}", f"strategy={name}") for name in options.strategies}
    if options.checkpoint is not None:
        load(runs, options.checkpoint)
    done = min(run.state.round for run in runs.values())
    blocks, block = (1, 2) if options.small else ((ROUNDS - done) // BLOCK, BLOCK)
    end, slowest = options.end - (0 if options.small else PROBES), 0.0
    for _ in range(blocks):
        if time.monotonic() + slowest > end:
            break
        start = time.monotonic()
        for name, run in runs.items():
            attempt(f"{name}, {run.state.round + block} rounds", partial(run_rounds, run, block))
            if run.state.round == PROBED:
                attempt(f"{name}, linear probe after {PROBED} rounds", partial(probe, run))
        save(runs, options.output)
        slowest = max(slowest, time.monotonic() - start)
    for name, run in runs.items():
        attempt(f"{name}, linear probe after {run.state.round} rounds", partial(probe, run))


def probe(run: Any) -> dict[str, float]:
    from server_app.models import load_each

    components = run.components
    models = {name: model.layers for name, model in run.state.models.items()}
    results = components.evaluator.evaluate(load_each(components.method, models))
    return {protocol: score.value for found in results.values() for protocol, score in found.items()}


def part(name: str, options: Options, attempt: Attempt) -> None:
    import torch

    if options.small:
        torch.set_num_threads(1)
    if options.device == "cuda":
        attempt("device", lambda: f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if name in ("a", "d"):
        (correctness if name == "a" else learning)(options, attempt)
        return
    from benchmarks import gpu_throughput as measured

    (measured.throughput if name == "b" else measured.sharing)(options.device, options.small, attempt)


def run_part(name: str, options: Options, connection: Connection) -> None:
    """Run a part in this process, whose output is in the log."""
    with (options.output / "gpu.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    gc.freeze()  # the preloaded modules, which every collection would search
    attempted = partial(attempt, connection, options.end)
    attempted("end", partial(part, name, options, attempted))


class Results:
    """Results by part and case, printed and written one by one."""

    def __init__(self, output: Path) -> None:
        self.output, self.values = output, {}

    def add(self, name: str, case: str, result: object) -> None:
        self.values.setdefault(name, {})[case] = result
        (self.output / "gpu.json").write_text(json.dumps(self.values, indent=1) + "\n")
        line = f"{name}. {case}: {json.dumps(result)}"
        print(line, flush=True)
        with (self.output / "gpu.log").open("a") as log:
            log.write(line + "\n")

    @property
    def failed(self) -> bool:
        cases = [result for part in self.values.values() for result in part.values()]
        return any(isinstance(result, dict) and "failed" in result for result in cases)


def supervise(name: str, options: Options, results: Results, *, end: float) -> None:
    """Run a part in a new process, and stop that if its time has ended."""
    start, context = time.monotonic(), multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    budget = SECONDS if options.small else BUDGETS[name]
    options = replace(options, end=min(start + budget, end - GRACE))
    process = context.Process(target=run_part, args=(name, options, sender))
    process.start()
    sender.close()
    case = ""
    while case != "end" and wait([receiver], max(0.0, options.end + GRACE - time.monotonic())):
        try:
            case, result = receiver.recv()
        except EOFError:  # the process has crashed
            break
        results.add(name, case, result)
    process.join(1)
    if case != "end":
        results.add(name, "end", {"failed": f"stopped, or crashed with exit status {process.exitcode}"})
    process.kill()
    process.join()
    results.add(name, "seconds", round(time.monotonic() - start, 1))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="gather wheels and data in this folder, and end")
    parser.add_argument("--data", help="pattern of the parquet files of CIFAR-10")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny problems, to test the script")
    parser.add_argument("--parts", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help="of part d; processes can have one each")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run")
    parser.add_argument("--continue", type=Path, dest="checkpoint", metavar="FILE", help="the file checkpoint.0")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="a folder")
    given = parser.parse_args()
    if given.prepare:
        prepare(given.prepare, sorted(glob(given.data or "")))  # noqa: PTH207, of absolute patterns, too
        return
    end = time.monotonic() + given.seconds
    given.output.mkdir(parents=True, exist_ok=True)
    options = Options(
        device=given.device,
        small=given.small,
        output=given.output,
        data=given.data,
        checkpoint=given.checkpoint,
        strategies=given.strategies,
    )
    results = Results(given.output)
    # A server imports these once, and forks the processes before any of them uses the device.
    multiprocessing.set_forkserver_preload(["benchmarks.gpu_throughput", "benchmarks.local_engine"])
    for name in given.parts:
        supervise(name, options, results, end=end)
    sys.exit(results.failed)


if __name__ == "__main__":
    main()
