"""Images per second of a client on a device: settings for GPUs, plain loops, and processes that share the device.

Parts b and c of `gpu.py`.
"""

import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from benchmarks.augmentation import MEAN, STD, PilViews, clock
from benchmarks.clients import Client, Epoch, bare, ours, precisions
from benchmarks.common import time_in_turn
from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.machine.devices import check_cuda_features
from fedssl.views import Views

EAGER = ["cuda_graphs=false"]
VARIANTS = {
    "default": [],  # CUDA graphs
    "triton": ["gpu_augmentation=triton"],
    "eager": EAGER,
    "eager, triton": [*EAGER, "gpu_augmentation=triton"],
}
LARGE = ["dataset.size=224", "batch_size=128"]
CASES = {  # in order of importance
    "simclr, resnet18, 256": ["encoder=resnet18", "batch_size=256"],
    "byol, resnet18, 256": ["encoder=resnet18", "batch_size=256", "method=byol"],
    "simclr, resnet18, 128": ["encoder=resnet18", "batch_size=128"],
    "simclr, resnet18, 512": ["encoder=resnet18", "batch_size=512"],
    "simclr, resnet50, 224 pixels": ["encoder=resnet50", "encoder.stem=imagenet", *LARGE],
    "simclr, vit_small, 224 pixels": ["encoder=vit_small", "encoder.patch=16", *LARGE],
}
SMALL = {"simclr, conv_small, 8": ["batch_size=8"], "byol, conv_small, 8": ["batch_size=8", "method=byol"]}
TURNS, STEPS, LARGE_STEPS, SMALL_STEPS = 3, 40, 8, 2

Attempt = Callable[[str, Callable[[], object]], None]


def throughput(device: str, small: bool, attempt: Attempt) -> None:
    """Measure every setting, limit and peer of every case."""
    cases = SMALL if small else CASES
    for case, overrides in cases.items():
        for variant, extra in VARIANTS.items():
            attempt(f"{case}, {variant}", partial(rate, device, [*overrides, *extra], ours, small=small))
        for peer in (bare, torchvision_loop, pil_loop):
            attempt(f"{case}, {peer.__name__}", partial(rate, device, [*overrides, *EAGER], peer, small=small))
    for case in list(cases)[:2]:  # last, because compilation may take a minute
        attempt(
            f"{case}, compile", partial(rate, device, [*cases[case], "gpu_augmentation=triton"], compiled, small=small)
        )


def rate(device: str, overrides: Sequence[str], make: Callable[[Client], Epoch], *, small: bool) -> float:
    """Return the median of images per second."""
    steps = SMALL_STEPS if small else LARGE_STEPS if "dataset.size=224" in overrides else STEPS
    client = make_client(device, overrides, steps=steps)
    seconds = time_in_turn({"": make(client)}, turns=1 if small else TURNS, clock=clock)[""]
    return round(len(client.images) / statistics.median(seconds), 1)


def make_client(device: str, overrides: Sequence[str], *, steps: int) -> Client:
    """Return a client with images for some steps, in bf16 if the device supports it natively."""
    used = torch.device(device)
    chosen = [f"precision={precisions(used)[-1]}", *overrides]
    training = compose(["dataset=cifar10", *chosen]).training
    check_cuda_features(training, used)  # a CPU would ignore them
    return Client(chosen, num_images=steps * training.batch_size, device=used)


def compiled(client: Client) -> Epoch:
    if not client.images.is_cuda:
        raise InputError("compile=true is faster on GPUs only; use --device cuda")
    client.method.encoder.compile()
    return ours(client)


def torchvision_loop(client: Client) -> Epoch:
    """Return an epoch of the plain loop with torchvision's transforms of batches on the device."""
    size = client.images.shape[-1]
    blur = v2.GaussianBlur(size // 20 * 2 + 3, (0.1, 2.0))  # 5 for 32 pixels, as in augmentation.py; 25 for 224
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(0.2, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([blur], p=0.5),
            v2.Normalize(MEAN, STD),
        ]
    )
    batches = client.images.split(client.training.batch_size)
    return plain_loop(client, lambda: ((transform(batch), transform(batch)) for batch in batches))


def pil_loop(client: Client) -> Epoch:
    """Return an epoch of the plain loop with a DataLoader of torchvision's views of PIL images."""
    loader = DataLoader(
        PilViews(client.images.cpu()),
        batch_size=client.training.batch_size,
        shuffle=True,
        num_workers=len(os.sched_getaffinity(0)),
        multiprocessing_context="fork",
        persistent_workers=True,
        pin_memory=client.images.is_cuda,
    )
    return plain_loop(client, lambda: loader)


def plain_loop(client: Client, batches: Callable[[], Iterable[Sequence[torch.Tensor]]]) -> Epoch:
    """Return an epoch of the standard loop over batches of two views."""
    device, training = client.images.device, client.training

    def epoch() -> float:
        for batch in batches():
            pair = [view.to(device, non_blocking=True).to(memory_format=torch.channels_last) for view in batch]
            training.optimizer.zero_grad(set_to_none=True)
            with training.autocast(device):
                loss = client.loss(Views.of(*pair), client.labels)
            loss.backward()
            training.optimizer.step()
            client.method.on_step_end()
        return loss.item()

    return epoch


def sharing(device: str, small: bool, attempt: Attempt) -> None:
    """Measure 1, 2, 4 and 8 processes that train at the same time."""
    counts, seconds = ((1, 2), 0.5) if small else ((1, 2, 4, 8), 4.0)
    chosen = ["batch_size=8"] if small else ["encoder=resnet18", "batch_size=64"]
    context, connections = multiprocessing.get_context("forkserver"), []
    multiprocessing.set_forkserver_preload([__name__])  # each process starts its own fork server
    for _ in range(counts[-1]):
        own, theirs = context.Pipe()
        context.Process(target=share, args=(theirs, device, chosen), daemon=True).start()
        theirs.close()
        connections.append(own)
    for count in counts:
        attempt(f"{count} processes", partial(rates_together, connections, count, seconds))


def rates_together(connections: Sequence[Connection], count: int, seconds: float) -> float:
    """Return the images per second of the first processes together."""
    for connection in connections:
        connection.recv()  # ready: the start of another process would slow down those that are measured
    for place, connection in enumerate(connections):
        connection.send(seconds if place < count else 0.0)
    return round(sum(connection.recv() for connection in connections), 1)


def share(connection: Connection, device: str, overrides: Sequence[str]) -> None:
    """Train for as many seconds as requested, and send the images per second, until the other end is closed."""
    torch.set_num_threads(1)
    client = make_client(device, overrides, steps=4)
    epoch = ours(client)
    epoch()
    while True:
        connection.send("ready")
        try:
            seconds = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        start, images = clock(), 0
        while clock() - start < seconds:
            epoch()
            images += len(client.images)
        connection.send(images / (clock() - start))
