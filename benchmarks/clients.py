"""Clients that train on random images: ours, bare forward and backward passes, and a usual one."""

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.utils.data import DataLoader, StackDataset

from benchmarks.augmentation import PilViews
from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.machine.process import OPENMP_ENV, set_allocator_thresholds
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_layers
from fedssl.training import LocalTrainer, method_inputs, train
from fedssl.views import Views
from fedssl.wire.messages import TrainPlan

Epoch = Callable[[], float]


def precisions(device: torch.device) -> list[str]:
    """Return fp32, and bf16 if the device supports it natively."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return ["fp32", "bf16"] if native else ["fp32"]


class Client:
    """A client at the start of a round: images, method and trainer."""

    def __init__(self, overrides: Sequence[str], *, num_images: int, device: torch.device, seed: int = 0) -> None:
        self.settings = compose(["dataset=cifar10", *overrides])
        random, size = torch.Generator().manual_seed(0), self.settings.data.size
        shape = (num_images, self.settings.data.channels, size, size)
        self.images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random).to(device)
        self.labels = torch.randint(0, 10, (num_images,), generator=random).to(device)
        self.method = build_method(self.settings.model).to(device)
        layers = exchanged_layers(self.method)
        plan = TrainPlan(round=1, layers=layers, settings="", metrics=(), oldest_resumable_round=0, code_fingerprint="")
        self.settings.algorithm.strategy.instantiate().client.load_start(self.method, plan, None)
        self.method.train()
        self.training = LocalTrainer.build(self.settings.training, self.method)
        self.generator = torch.Generator().manual_seed(seed)

    def loss(self, views: Views, labels: Tensor) -> Tensor:
        return self.method.loss(method_inputs(self.method, views, labels, self.generator))

    def views(self) -> list[Views]:
        """Return the views of each batch."""
        batches = self.images.split(self.training.batch_size)
        return [self.training.augment(batch, self.generator) for batch in batches]


def ours(client: Client) -> Epoch:
    training = replace(client.training, epochs=1)

    def epoch() -> float:
        labels = client.labels if client.method.uses_labels else None
        indices = torch.arange(len(client.images))
        result = train(
            client.method,
            TensorImages(client.images),
            indices,
            training=training,
            generator=client.generator,
            labels=labels,
        )
        return result.loss

    return epoch


def augmentation(client: Client) -> Epoch:
    return lambda: float(len(client.views()))


def bare(client: Client) -> Epoch:
    views = [
        views.with_images([images.contiguous(memory_format=torch.channels_last) for images in views.images])
        for views in client.views()
    ]
    batches = list(zip(views, client.labels.split(client.training.batch_size), strict=True))

    def epoch() -> float:
        for views, labels in batches:
            client.method.zero_grad(set_to_none=True)
            bf16 = client.training.precision == "bf16"
            with torch.autocast(client.images.device.type, dtype=torch.bfloat16, enabled=bf16):
                loss = client.loss(views, labels)
            loss.backward()
        return loss.item()

    return epoch


def usual(client: Client, *, persistent: bool) -> Epoch:
    dataset = StackDataset(PilViews(client.images.cpu()), client.labels.cpu())
    make_loader = partial(
        DataLoader,
        dataset,
        batch_size=client.training.batch_size,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="fork",  # default on Linux, except in a spawned process
        persistent_workers=persistent,
        pin_memory=client.images.is_cuda,
        generator=client.generator,
    )
    loader = make_loader()

    def epoch() -> float:
        losses = []
        for views, labels in loader if persistent else make_loader():
            client.training.optimizer.zero_grad()
            view1, view2, labels = (tensor.to(client.images.device) for tensor in (*views, labels))
            loss = client.loss(Views.of(view1, view2), labels)
            loss.backward()
            client.training.optimizer.step()
            client.method.on_step_end()
            losses.append(loss.item())
        return statistics.mean(losses)

    return epoch


class UsualClients:
    """Usual clients in a separate process, one at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        if not options.tuned_usual:
            for variable in OPENMP_ENV:
                os.environ.pop(variable, None)
        arguments = (theirs, options.device, options.threads, options.tuned_usual)
        multiprocessing.get_context("spawn").Process(target=serve, args=arguments).start()

    def __call__(self, overrides: Sequence[str], *, num_images: int) -> Epoch:
        self.connection.send((overrides, num_images))

        def epoch() -> float:
            self.connection.send("epoch")
            return self.connection.recv()

        return epoch

    def close(self) -> None:
        self.connection.send(None)


def serve(connection: Connection, device: torch.device, threads: int, tuned: bool) -> None:
    """Create clients and run epochs as requested, until None is received."""
    torch.set_num_threads(threads)
    if tuned:
        set_allocator_thresholds()
    epoch = None
    while (request := connection.recv()) is not None:
        if request == "epoch":
            connection.send(epoch())
        else:
            overrides, num_images = request
            epoch = usual(Client(overrides, num_images=num_images, device=device), persistent=tuned)
