"""Local training: images per second, relative to bare forward and backward passes and to a usual client.

    uv run python benchmarks/training.py [--encoders conv_small] [--methods simclr byol] [--batch 256] [--quick]

Random images of 32x32. Method, augmentation and optimizer are those of a client. Everything is timed in turn, and
medians are compared. ``*`` marks a missed target. Parts (``--parts``):

speed   ours:  `fedssl.training.train`, with augmentation, optimizer and moving averages;
        bare:  forward and backward passes of the same network and loss on precomputed views (target: ours needs at most
               1.15 times as long);
        usual: fp32, two torchvision views of one PIL image at a time, a DataLoader with two workers, and the standard
               loop (target: ours is at least 3.5 times as fast in bf16, and twice in fp32, where the bare loop allows
               it: "limit" is usual / bare).
losses  After the same steps from the same weights, ours differs from the usual client's by no more than between seeds.
fur     A step of SimCLR with FUR relative to one without (target: at most 1.10 times as long at batch 128).
profile The share of groups of operators in the time of an epoch. Off by default.
gpu     The settings for GPUs, one by one and combined, and a profile of an epoch of the first method. Off by default.

bf16 is omitted on devices that emulate it. Ours and bare have the settings of a run: waiting threads soon sleep, and
freed memory is kept. The usual client runs in a separate process with torch's defaults and creates its DataLoader for
each turn, as Flower's clients do for each round. ``--tuned-usual`` gives it our settings and a persistent DataLoader.
"""

import argparse
import os
import statistics
from contextlib import closing

from fedssl.machine.process import OPENMP_ENV, set_allocator_thresholds

if __name__ == "__main__":  # not in the process of the usual client
    os.environ.update(OPENMP_ENV | os.environ)  # before torch is imported, as the command fedssl does

import torch

from benchmarks.clients import Client, UsualClients, augmentation, bare, ours, precisions, usual
from benchmarks.common import make_parser, time_in_turn
from fedssl.machine.devices import select_device

METHODS = ("simclr", "byol", "simsiam", "barlow_twins", "moco_v3", "fedx", "orchestra", "supervised")
ENCODERS = ("conv_small", "resnet18")
STEPS, TURNS = {"conv_small": 8, "resnet18": 1}, {"conv_small": 9, "resnet18": 3}  # steps in a turn on a CPU
CUDA_STEPS = 40
LOSS_IMAGES, LOSS_BATCH, LOSS_EPOCHS, SEEDS = {"conv_small": 128, "resnet18": 64}, 32, 4, 4
BARE, FASTER, FUR = 1.15, {"fp32": 2.0, "bf16": 3.5}, 1.10  # targets

EAGER = ["cuda_graphs=false"]
GPU_SETTINGS = {
    "eager": EAGER,
    "fused": [*EAGER, "optimizer.fused=true"],
    "triton": [*EAGER, "gpu_augmentation=triton"],
    "graphs": [],
    "graphs, triton": ["gpu_augmentation=triton"],
}

OPERATORS = {  # parts of the names of torch's operators
    "convolution": ("conv",),
    "batch norm": ("batch_norm",),
    "ReLU and pooling": ("relu", "threshold", "clamp_min", "pool", "mean"),
    "matrix product": ("mm", "linear", "matmul"),
    "copies and casts": ("copy_", "_to_copy", "contiguous", "clone"),
    # of augmentation, loss, optimizer and moving averages
    "elementwise and sums": ("add", "sub", "mul", "div", "sum", "abs", "clamp", "maximum", "lerp", "exp", "log"),
}


def ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def overrides(encoder: str, method: str, precision: str, batch: int) -> list[str]:
    return [f"encoder={encoder}", f"method={method}", f"precision={precision}", f"batch_size={batch}"]


def make_client(encoder: str, method: str, precision: str, options: argparse.Namespace, *extra: str) -> Client:
    chosen = [*overrides(encoder, method, precision, options.batch), *extra]
    return Client(chosen, num_images=options.batch * options.steps[encoder], device=options.device)


def speed(encoder: str, options: argparse.Namespace) -> None:
    print(f"speed: {encoder}, batch {options.batch}, {options.turns[encoder]} turns of {options.steps[encoder]} steps")
    print("method        precision   ours/s   bare/s  ours/bare  augmentation  usual/s  ours/usual  limit")
    num_images = options.batch * options.steps[encoder]
    with closing(UsualClients(options)) as usual_clients:
        for method in options.methods:
            jobs = {"usual": usual_clients(overrides(encoder, method, "fp32", options.batch), num_images=num_images)}
            for precision in options.precisions:
                for job in (ours, bare, augmentation):
                    # Separate clients, so that no job finds the weights of another one in the cache.
                    jobs[f"{job.__name__} {precision}"] = job(make_client(encoder, method, precision, options))
            report_speed(method, time_in_turn(jobs, turns=options.turns[encoder]), num_images=num_images)


def report_speed(method: str, seconds: dict[str, list[float]], *, num_images: int) -> None:
    rate = {name: num_images / statistics.median(values) for name, values in seconds.items()}
    for precision in FASTER:
        if f"ours {precision}" not in seconds:
            continue
        own = seconds[f"ours {precision}"]
        to_bare, to_usual = ratio(own, seconds[f"bare {precision}"]), ratio(seconds["usual"], own)
        limit = ratio(seconds["usual"], seconds[f"bare {precision}"])
        share = ratio(seconds[f"augmentation {precision}"], own)
        print(
            f"{method:13s} {precision:9s} {rate[f'ours {precision}']:8.0f} {rate[f'bare {precision}']:8.0f}"
            f"  {to_bare:8.2f}{'*' if to_bare > BARE else ' '} {share:12.1%} {rate['usual']:9.0f}"
            f"  {to_usual:9.2f}{'*' if to_usual < min(FASTER[precision], limit / BARE) else ' '} {limit:6.2f}",
            flush=True,
        )


def losses(encoder: str, options: argparse.Namespace) -> None:
    num_images = LOSS_IMAGES[encoder]
    print(f"losses: {encoder}, {LOSS_EPOCHS} epochs of {num_images} images, batch {LOSS_BATCH}, {SEEDS} seeds")
    print("method        usual fp32             ours (distance in standard deviations over seeds)")
    for method in options.methods:
        results = {}
        for precision in ["usual", *options.precisions]:
            chosen = overrides(encoder, method, "fp32" if precision == "usual" else precision, LOSS_BATCH)
            last = []
            for seed in range(SEEDS):
                client = Client(chosen, num_images=num_images, device=options.device, seed=seed)
                epoch = usual(client, persistent=True) if precision == "usual" else ours(client)
                last.append([epoch() for _ in range(LOSS_EPOCHS)][-1])
            results[precision] = statistics.mean(last), statistics.stdev(last)
        mean, deviation = results.pop("usual")
        compared = [f"{p} {m:9.4f} ({abs(m - mean) / max(deviation, d):.1f})" for p, (m, d) in results.items()]
        print(f"{method:13s} {mean:9.4f} +- {deviation:7.4f}   {'   '.join(compared)}", flush=True)


def fur(encoder: str, options: argparse.Namespace) -> None:
    print(f"fur: {encoder}, batch {options.batch}")
    print("precision  without/s   with FUR/s   ratio")
    num_images = options.batch * options.steps[encoder]
    for precision in options.precisions:
        jobs = {
            name: ours(make_client(encoder, "simclr", precision, options, f"regularizer={name}"))
            for name in ("none", "fur")
        }
        seconds = time_in_turn(jobs, turns=4 * options.turns[encoder])
        none, with_fur = (num_images / statistics.median(seconds[name]) for name in jobs)
        cost = ratio(seconds["fur"], seconds["none"])
        print(f"{precision:9s} {none:10.0f} {with_fur:12.0f} {cost:7.2f}{'*' if cost > FUR else ''}", flush=True)


def profile(encoder: str, options: argparse.Namespace) -> None:
    for method in options.methods:
        for precision in options.precisions:
            epoch = ours(make_client(encoder, method, precision, options))
            epoch()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as measured:
                epoch()
            shares = dict.fromkeys([*OPERATORS, "other"], 0.0)
            for event in measured.key_averages():
                group = next((name for name, parts in OPERATORS.items() if any(p in event.key for p in parts)), "other")
                shares[group] += event.self_cpu_time_total
            total = sum(shares.values())
            text = ", ".join(f"{name} {share / total:.0%}" for name, share in shares.items())
            print(f"profile: {encoder}, batch {options.batch}, {method}, {precision}: {text}", flush=True)


def gpu(encoder: str, options: argparse.Namespace) -> None:
    for precision in options.precisions:
        print(f"gpu: {encoder}, batch {options.batch}, {precision}; images per second")
        print(f"{'':13s}" + "".join(f" {name:>15s}" for name in GPU_SETTINGS))
        for method in options.methods:
            jobs = {
                name: ours(make_client(encoder, method, precision, options, *extra))
                for name, extra in GPU_SETTINGS.items()
            }
            seconds = time_in_turn(jobs, turns=options.turns[encoder])
            num_images = options.batch * options.steps[encoder]
            rates = (num_images / statistics.median(seconds[name]) for name in GPU_SETTINGS)
            print(f"{method:13s}" + "".join(f" {rate:15.0f}" for rate in rates), flush=True)
            if options.device.type == "cuda" and method == options.methods[0]:
                for name in ("default", "graphs, triton"):
                    with torch.profiler.profile() as profile:
                        jobs[name]()
                    table = profile.key_averages().table(sort_by="self_device_time_total", row_limit=12)
                    print(f"an epoch, {name}:\n{table}", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parts = {part.__name__: part for part in (speed, losses, fur, profile, gpu)}
    parser.add_argument("--parts", nargs="+", choices=parts, default=["speed", "losses", "fur"])
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=ENCODERS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="auto: all native")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tuned-usual", action="store_true", help="our settings for the usual client")
    parser.add_argument("--quick", action="store_true", help="one short turn, to test the script")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.device = select_device(options.device)
    native = precisions(options.device)
    options.precisions = native if options.precision == "auto" else [options.precision]
    options.steps = dict.fromkeys(ENCODERS, CUDA_STEPS) if options.device.type == "cuda" else STEPS
    options.turns = TURNS
    if options.quick:
        options.batch, options.steps, options.turns = 16, dict.fromkeys(ENCODERS, 1), dict.fromkeys(ENCODERS, 1)
    name = torch.cuda.get_device_name() if options.device.type == "cuda" else f"CPU, {options.threads} threads"
    kept = set_allocator_thresholds()
    print(f"torch {torch.__version__}, {name}, native: {', '.join(native)}, freed memory kept: {kept}")
    for encoder in options.encoders:
        for part in options.parts:
            print()
            parts[part](encoder, options)


if __name__ == "__main__":
    main()
