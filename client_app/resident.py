"""The resident client: model, pictures and optimiser that one process keeps and all its clients use in turn."""

import functools
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from client_app.state import load_state, save_state
from fedssl.config import make
from fedssl.datasets.base import load
from fedssl.machine.devices import pick_device
from fedssl.machine.threads import tune_allocator
from fedssl.messages import ClientUpdate, TrainPlan
from fedssl.methods import build
from fedssl.model_layers import travelling_names
from fedssl.partition import split
from fedssl.schedule.stages import enter, frozen_names
from fedssl.seeding import derive, seed_torch, torch_generator
from fedssl.training import train


class Resident:
    """Everything of a run that does not differ between the clients of a process."""

    def __init__(self, settings: DictConfig) -> None:
        torch.set_num_threads(settings.threads)
        if settings.allocator:
            tune_allocator()
        self.settings = settings
        self.device = pick_device(settings.device)
        pictures = load(settings.dataset, "federated")
        self.images = pictures.images.to(self.device)
        self.parts = split(settings, pictures)
        self.augment = make(settings.augmentation)
        self.regularizer = make(settings.regularizer)
        self.strategy = make(settings.strategy)
        self.method = build(settings).to(self.device)
        self.labels = pictures.labels.to(self.device) if self.method.uses_labels else None
        self.optimizer = make(settings.optimizer, [self.method.tensors[name] for name in self.method.trainable])
        self.lrs = [group["lr"] for group in self.optimizer.param_groups]
        if settings.compile:
            self.method.encoder.compile()

    def train(self, plan: TrainPlan, partition_id: int, state_folder: Path) -> ClientUpdate:
        """One client's part in a round."""
        start = time.perf_counter()
        if plan.depth is not None:
            enter(self.method, depth=plan.depth, frozen=plan.frozen, dropout=plan.depth_dropout)
        state = load_state(state_folder, before=plan.round)
        arrived = plan.layers
        if plan.frozen:
            before = load_state(state_folder / "frozen", before=plan.round) or {}
            plan = replace(plan, layers={name: value.numpy() for name, value in before.items()} | arrived)
        absent = set(travelling_names(self.method)) - plan.layers.keys() - (state or {}).keys()
        if absent:  # whatever the model holds there, it is not this client's
            raise ValueError(f"the plan lacks {len(absent)} layers of the model, such as {min(absent)}")
        indices = self.parts[partition_id]
        place = (self.settings.seed, "train", plan.round, partition_id)
        seed_torch(derive(*place), self.device)
        self.strategy.load_global(self.method, plan, state)
        self.optimizer.state.clear()
        for group, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):
            group["lr"] = lr * plan.lr_factor
        result = train(
            self.method,
            self.images,
            torch.from_numpy(np.asarray(indices)),
            augment=self.augment,
            optimizer=self.optimizer,
            regularizer=self.regularizer,
            epochs=self.settings.local_epochs,
            batch_size=self.settings.batch_size,
            precision=self.settings.precision,
            channels_last=self.settings.channels_last,
            clip_norm=self.settings.clip_norm,
            generator=torch_generator(*place),
            labels=self.labels,
        )
        if self.settings.local_epochs and not math.isfinite(result.loss):
            raise ValueError(f"training diverged: the loss is {result.loss}; what it kept from before stays")
        self.method.end_round()
        kept = self.strategy.keep(self.method, plan)
        if kept:
            save_state(state_folder, kept, round=plan.round, keep_from=plan.keep_from)
        if plan.hold and not arrived.keys().isdisjoint(frozen_names(self.method)):
            held = {name: torch.from_numpy(plan.layers[name]) for name in frozen_names(self.method)}
            save_state(state_folder / "frozen", held, round=plan.round, keep_from=plan.keep_from)
        return ClientUpdate(
            layers=self.strategy.send(self.method, plan),
            partition_id=partition_id,
            num_examples=result.num_examples,
            train_loss=result.loss,
            seconds=time.perf_counter() - start,
        )


@functools.lru_cache(maxsize=1)
def resident(settings: str) -> Resident:
    """The resident client of this process for the resolved settings (YAML)."""
    return Resident(OmegaConf.create(settings))
