"""The worker: model, images and optimizer of one process, which all its clients use in turn."""

import gc
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from client_app.local_data import ClientRound, LocalDataSample
from client_app.state_store import FILE_STORE, LayerFiles, StateStore
from fedssl.arrays import Layers
from fedssl.config.settings import ClientSettings
from fedssl.datasets.base import forget_images, load_federated
from fedssl.datasets.cache import cache_folder
from fedssl.datasets.storage import can_be_read
from fedssl.errors import RequestRefused
from fedssl.machine.cuda_graphs import WARMUP_STEPS
from fedssl.machine.devices import is_gpu
from fedssl.machine.process import configure_process
from fedssl.methods.base import build_method
from fedssl.methods.unsaved_state import UnsavedState
from fedssl.model_arrays import (
    check_loaded,
    copy_layers,
    exchanged_names,
    local_names,
    names_in_parts,
    read_layers,
    read_once,
)
from fedssl.partition import client_indices, labeled_indices, shifted
from fedssl.regularizers.base import CombinedRegularizer, Regularizer
from fedssl.schedule.stages import frozen_names, set_active_stages
from fedssl.seeding import derive_seed, seed_generators, torch_generator
from fedssl.training import LocalSteps, LocalTrainer, TrainResult, number_of_batches, train
from fedssl.wire.messages import ClientUpdate, PersonalizedModelRequest, TrainPlan
from strategies.base import check_state, make_strategy
from strategies.mods import make_client_mods

TARGETS_FOLDER = "targets"  # in the folder of ``dataset.cache``


class ClientWorker:
    """Everything of a run that is the same for all clients of a process."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.device = configure_process(settings.machine)
        image_data = load_federated(settings.data)
        self.images = image_data.images.place(self.device)
        self.failed_files = image_data.failed_files
        self.client_indices = None
        if (partition := settings.partition) is not None:
            self.client_indices = client_indices(partition, image_data)
            self.images = shifted(self.images, self.client_indices, partition)
        self.client_strategy = make_strategy(settings.strategy).client
        self.method = build_method(settings.model).to(self.device)
        cache = cache_folder(settings.data.reader.values.get("cache"))
        if cache is not None:
            self.method.store_targets_in(cache / TARGETS_FOLDER)
        if self.method.uses_labels and settings.partition is None:
            raise RequestRefused(f"{type(self.method).__name__} needs labels, and devices agree on no classes")
        labels = image_data.labels if self.method.uses_labels else None
        self.labels = None if labels is None else labels.to(self.device)
        if self.method.uses_labels and self.client_indices is not None:
            self.client_indices = labeled_indices(self.client_indices, labels)
        self.training = LocalTrainer.build(settings.training, self.method, term=self.client_strategy.term)
        if settings.machine.compile_encoder:
            self.method.encoder.compile()
        self.mods = make_client_mods(self.method, settings.base_folders)
        self._unsaved = UnsavedState(self.method, *self.training.parts, self.client_strategy)

    def train(
        self,
        plan: TrainPlan,
        client: int,
        state_folder: Path,
        *,
        store: StateStore = FILE_STORE,
        on_step_start: Callable[[], None] = lambda: None,
    ) -> ClientUpdate:
        """Train one client for one round and return its update. ``on_step_start`` as in `fedssl.training.train`."""
        start = time.perf_counter()
        strategy, method = self.client_strategy, self.method
        with self._active_stages(plan):
            private = set(plan.upload_names or ()) - set(exchanged_names(method))
            if private:
                raise RequestRefused(f"layer {min(private)!r} was asked for, which is not exchanged")
            round = self._prepare(plan, client, state_folder, store=store, on_step_start=on_step_start)
            round = self._select_model(round)
            seed_path = (self.settings.seed, "train", plan.round, client)

            def train_again(regularizer: Regularizer) -> None:
                seed_generators(derive_seed(*seed_path), self.device)
                combined = CombinedRegularizer(self.training.regularizer, regularizer)
                self._train(round, replace(self.training, regularizer=combined), torch_generator(*seed_path))

            seed_generators(derive_seed(*seed_path), self.device)
            start_layers = strategy.load_start(method, round.plan, round.state)
            result = self._train(round, self.training, torch_generator(*seed_path))
            method.end_round()
            method.saved_buffers.keep()
            finished, strategy_arrays = strategy.finish_training(
                method, round.plan, start=start_layers, state=round.state, steps=self._steps(round)
            )
            personalized = strategy.train_personalized(method, round.plan, round.state, train=train_again)
            self.training.free_training_memory()
            with read_once(method, self._changed_names(round.plan)):
                state = strategy.state_to_save(method, round.plan, start=start_layers, state=round.state)
                state = check_state(state | finished | personalized, strategy)
                uploaded_parts = self._parts_to_upload()
                layers = strategy.upload(method, round.plan)
            for mod in self.mods:
                layers = mod.upload(layers, plan)
            # Without an empty state, the next round would use the evicted one.
            saves = bool(state) or client in plan.evicted_clients
            if saves:
                store.save(state_folder, state, round=plan.round, oldest_resumable=plan.oldest_resumable_round)
            for mod in self.mods:
                mod.keep(plan, round.plan, self._cache(state_folder))
            return ClientUpdate(
                layers=layers,
                uploaded_parts=uploaded_parts,
                strategy_arrays=strategy_arrays,
                partition_id=client,
                model_index=round.model_index,
                num_examples=result.num_examples,
                train_loss=result.loss,
                seconds=time.perf_counter() - start,
                state_rounds=(round.state_round, plan.round if saves else round.state_round),
            )

    def try_steps(
        self,
        plan: TrainPlan,
        client: int,
        state_folder: Path,
        *,
        batch_size: int,
        precision: str,
        store: StateStore = FILE_STORE,
        on_step_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Train on a batch of ``batch_size`` images, to measure whether it fits into memory. Nothing is saved.

        There are as many steps as need more memory than those before: the optimizer has its state after the first, and
        CUDA graphs are captured after the warm-up.
        """
        with self._active_stages(plan):
            round = self._prepare(plan, client, state_folder, store=store, on_step_start=on_step_start)
            self.client_strategy.load_start(self.method, round.plan, round.state)
            epochs = 2 if self.training.graphs is None else WARMUP_STEPS + 2
            training = replace(self.training, epochs=epochs, batch_size=batch_size, precision=precision)
            self.client_strategy.start_term(self.method, round.plan, round.state)
            training.reset_optimizer(lr_factor=round.plan.lr_factor)
            train(
                self.method,
                self.images,
                round.indices[:batch_size],
                training=training,
                generator=torch_generator(self.settings.seed, "try", plan.round, client),
                labels=self.labels,
                on_step_start=on_step_start,
            )

    def personalized_encoder(
        self,
        plan: TrainPlan,
        client: int,
        state_folder: Path,
        *,
        request: PersonalizedModelRequest,
        store: StateStore = FILE_STORE,
    ) -> ClientUpdate:
        """Return the client's personalized encoder, including local parts. No state is saved.

        An unseen client has no state by which `select_model` could compare models. Such a client first trains the
        default model.
        """
        strategy, method = self.client_strategy, self.method
        with self._active_stages(plan):
            training = replace(self.training, epochs=request.adaptation_epochs)
            round = self._prepare(plan, client, state_folder, store=store)
            seed_path = (self.settings.seed, "own", plan.round, client)
            selected = self._select_model(round)
            if plan.candidate_arrays and request.adaptation_epochs and strategy.selects_by_state:
                start_layers = strategy.load_start(method, selected.plan, selected.state)
                seed_generators(derive_seed(*seed_path, "first"), self.device)
                self._train(selected, training, torch_generator(*seed_path, "first"))
                state = strategy.state_to_save(method, selected.plan, start=start_layers, state=selected.state)
                selected = self._select_model(replace(round, state=state))
            seed_generators(derive_seed(*seed_path), self.device)
            strategy.personalized_model(method, selected.plan, selected.state)
            if request.after_adaptation:
                self._train(selected, training, torch_generator(*seed_path))
            unused = {*method.inactive_names, *method.base_names}
            names = [name for name in method.named_tensors if name.startswith("encoder.") and name not in unused]
            check_loaded(method, names)
            return ClientUpdate(
                layers=copy_layers(method, names),
                partition_id=client,
                model_index=selected.model_index,
                state_rounds=(round.state_round, round.state_round),
            )

    def _parts_to_upload(self) -> Layers:
        method = self.method
        if not method.uploaded_parts:
            return {}
        uploaded = names_in_parts(method, method.uploaded_parts)
        return method.parts_to_upload(read_layers(method, [*uploaded, *local_names(method)]))

    def _changed_names(self, plan: TrainPlan) -> set[str]:
        """Return the names of the layers that training changes, and of those to upload; none on a CPU."""
        if not is_gpu(self.device):  # where `read_once` has no effect
            return set()
        method = self.method
        uploaded = names_in_parts(method, method.uploaded_parts)
        changed = {*exchanged_names(method), *local_names(method), *uploaded} - set(frozen_names(method))
        return changed | set(plan.upload_names or ())

    def _active_stages(self, plan: TrainPlan) -> AbstractContextManager[None]:
        self.method.round = plan.round
        return set_active_stages(
            self.method, depth=plan.num_stages, frozen=plan.num_frozen_stages, depth_dropout=plan.depth_dropout
        )

    def _prepare(
        self,
        plan: TrainPlan,
        client: int,
        state_folder: Path,
        *,
        store: StateStore,
        on_step_start: Callable[[], None] = lambda: None,
    ) -> ClientRound:
        """Complete the plan by the layers that the client holds, and join broadcast parts to its layers."""
        self._unsaved.reset()
        self.method.client = client
        completed = plan
        for mod in self.mods:
            completed = mod.download(completed, self._cache(state_folder))
        evicted = client in plan.evicted_clients  # then the plan has all layers
        stored = None if evicted else store.load(state_folder, before=plan.round, template=self.method.named_tensors)
        state, state_round = (stored.tensors or None, stored.round) if stored else (None, 0)
        layers, candidates, broadcast = completed.layers, completed.candidate_arrays, completed.broadcast
        missing = set(exchanged_names(self.method)) - layers.keys() - (state or {}).keys()
        if missing:  # the model contains another client's
            raise RequestRefused(f"the plan lacks {len(missing)} layers of the model, such as {min(missing)}")
        missing = set(names_in_parts(self.method, self.method.broadcast_parts)) - broadcast.keys()
        if missing:
            raise RequestRefused(
                f"the plan lacks {len(missing)} layers of the method's server side, such as {min(missing)}"
            )
        like = self.method.named_tensors
        for name, array in completed.strategy_arrays.items():
            if name not in like or like[name].shape != array.shape:
                raise RequestRefused(f"array {name!r} of the strategy is like no layer of the model")
        if any(candidate.keys() != layers.keys() for candidate in candidates):
            raise RequestRefused("the models of the plan are not of the same layers")
        return ClientRound(
            client=client,
            indices=self._indices(client),
            state=state,
            state_round=state_round,
            # Broadcast parts are loaded with the other layers, in one copy.
            plans=tuple(replace(completed, layers=model | broadcast) for model in (layers, *candidates)),
            on_step_start=on_step_start,
        )

    def _cache(self, state_folder: Path) -> LayerFiles:
        return LayerFiles(state_folder, template=self.method.named_tensors)

    def _select_model(self, round: ClientRound) -> ClientRound:
        if len(round.plans) == 1:
            return round
        local_data = LocalDataSample(
            self.images,
            round.indices,
            data=self.settings.data,
            training=self.training,
            seed_path=(self.settings.seed, "choose", round.plan.round, round.client),
            labels=self.labels,
            on_step_start=round.on_step_start,
        )
        model_index = self.client_strategy.select_model(self.method, round.plans, round.state, local_data)
        self._unsaved.reset()
        return replace(round, model_index=model_index)

    def _steps(self, round: ClientRound) -> LocalSteps:
        training, min_batch_size = self.training, self.method.min_batch_size
        per_epoch = number_of_batches(len(round.indices), training.batch_size, min_batch_size=min_batch_size)
        return LocalSteps.of(training.optimizer, number=training.epochs * per_epoch)

    def _indices(self, client: int) -> torch.Tensor:
        if self.client_indices is None:
            return torch.arange(len(self.images))
        return torch.from_numpy(np.asarray(self.client_indices[client]))

    def _train(self, round: ClientRound, training: LocalTrainer, generator: torch.Generator) -> TrainResult:
        if len(round.indices) < self.method.min_batch_size:
            raise RequestRefused(
                f"{type(self.method).__name__} learns nothing from fewer than {self.method.min_batch_size} images, "
                f"and the client has {len(round.indices)}"
            )
        self.client_strategy.start_term(self.method, round.plan, round.state)
        training.reset_optimizer(lr_factor=round.plan.lr_factor)
        result = train(
            self.method,
            self.images,
            round.indices,
            training=training,
            generator=generator,
            labels=self.labels,
            on_step_start=round.on_step_start,
        )
        if training.epochs and not math.isfinite(result.loss):
            raise RequestRefused(
                f"training diverged: loss={result.loss}; lower optimizer.lr (the client's previous state was kept)"
            )
        return result


_workers: dict[tuple[ClientSettings, str], ClientWorker] = {}  # at most one


def worker_for(settings: ClientSettings, *, images: str = "") -> ClientWorker:
    """Return this process's worker for these settings. That for other settings is released before, with its memory.

    ``images`` identifies the content of the data set, if it may change while this process runs. Files of it that could
    not be read are read again once it is possible.
    """
    key = (settings, images)
    if key not in _workers or (images and any(map(can_be_read, _workers[key].failed_files))):
        release_worker()
        if images:
            forget_images()
        _workers[key] = ClientWorker(settings)
    return _workers[key]


def release_worker() -> None:
    """Release this process's worker, so that the next message builds another."""
    _workers.clear()
    gc.collect()  # a model has reference cycles
