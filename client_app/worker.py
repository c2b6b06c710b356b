"""The worker: model, images and optimizer of one process, which all its clients use in turn."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from client_app.local_data import LocalDataSample
from client_app.state_store import FILE_STORE, StateStore, load_state, save_state
from fedssl.config.settings import ClientSettings
from fedssl.datasets.base import load_federated
from fedssl.errors import RequestRefused
from fedssl.machine.devices import place_images
from fedssl.machine.process import configure_process
from fedssl.methods.base import build_method
from fedssl.model_arrays import copy_layers, exchanged_names, load_layers, names_in_parts
from fedssl.partition import client_indices
from fedssl.regularizers.base import CombinedRegularizer, Regularizer
from fedssl.schedule.stages import frozen_names, set_active_stages
from fedssl.seeding import derive_seed, seed_torch, torch_generator
from fedssl.training import LocalTrainer, TrainResult, train
from fedssl.wire.messages import ClientUpdate, PersonalizedModelRequest, TrainPlan
from strategies.base import ClientStrategy
from strategies.interfaces import ClientState


class ClientWorker:
    """Everything of a run that is the same for all clients of a process."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.device = configure_process(settings.machine)
        image_data = load_federated(settings.data)
        self.images = place_images(image_data.images, self.device)
        self.client_indices = None if settings.partition is None else client_indices(settings.partition, image_data)
        self.client_strategy: ClientStrategy = settings.strategy.instantiate().client
        self.method = build_method(settings.model).to(self.device)
        if self.method.uses_labels and settings.partition is None:
            raise RequestRefused(f"{type(self.method).__name__} needs labels, and devices agree on no classes")
        labels = image_data.labels if self.method.uses_labels else None
        self.labels = None if labels is None else labels.to(self.device)
        self.training = LocalTrainer.build(settings.training, self.method)
        if settings.machine.compile_encoder:
            self.method.encoder.compile()

    def train(
        self,
        plan: TrainPlan,
        client: int,
        state_folder: Path,
        *,
        store: StateStore = FILE_STORE,
        on_step_start: Callable[[], None] = lambda: None,
    ) -> ClientUpdate:
        """Train one client for one round and return its update.

        Parameters
        ----------
        plan : TrainPlan
        client : int
            Partition id. For a client without a partition, its number in seeds.
        state_folder : Path
            Folder of the client's state.
        store : StateStore
            Store of the state.
        on_step_start : callable
            See `fedssl.training.train`.
        """
        start = time.perf_counter()
        with set_active_stages(
            self.method, depth=plan.num_stages, frozen=plan.num_frozen_stages, depth_dropout=plan.depth_dropout
        ):
            private = set(plan.upload_names or ()) - set(exchanged_names(self.method))
            if private:
                raise RequestRefused(f"layer {min(private)!r} was asked for, which is not exchanged")
            arrived, indices = {*plan.layers, *plan.broadcast}, self._indices(client)
            plan, state = self._received(plan, state_folder, store)
            chosen, plan = self._choose(plan, client, indices, state, on_step_start)
            place = (self.settings.seed, "train", plan.round, client)
            seed_torch(derive_seed(*place), self.device)
            start_layers = self.client_strategy.load_start(self.method, plan, state)
            result = self._train(self.training, plan, indices, torch_generator(*place), on_step_start)
            self.method.end_round()
            again = functools.partial(self._train_again, plan, indices, place, on_step_start)
            own = self.client_strategy.train_personalized(self.method, plan, state, train=again)
            kept = self.client_strategy.state_to_save(self.method, plan, start=start_layers, state=state) | own
            if kept:
                store.save(state_folder, kept, round=plan.round, keep_from=plan.oldest_resumable_round)
            frozen = frozen_names(self.method) if plan.cache_frozen else []
            constant = names_in_parts(self.method, self.method.static_parts)
            for folder, names, source in (("frozen", frozen, plan.layers), ("constant", constant, plan.broadcast)):
                if not arrived.isdisjoint(names):
                    held = {name: torch.from_numpy(source[name]) for name in names}
                    save_state(state_folder / folder, held, round=plan.round, keep_from=plan.oldest_resumable_round)
            return ClientUpdate(
                layers=self.client_strategy.layers_to_upload(self.method, plan),
                uploaded_parts=copy_layers(self.method, names_in_parts(self.method, self.method.uploaded_parts)),
                partition_id=client,
                model_index=chosen,
                num_examples=result.num_examples,
                train_loss=result.loss,
                seconds=time.perf_counter() - start,
            )

    def personalized_encoder(
        self,
        plan: TrainPlan,
        client: int,
        state_folder: Path,
        *,
        ask: PersonalizedModelRequest,
        store: StateStore = FILE_STORE,
    ) -> ClientUpdate:
        """Return the client's personalized encoder, including local parts. No state is saved.

        An unseen client has no state by which `select_model` could compare models. Such a client first trains the
        default model.
        """
        with set_active_stages(
            self.method, depth=plan.num_stages, frozen=plan.num_frozen_stages, depth_dropout=plan.depth_dropout
        ):
            training, indices = replace(self.training, epochs=ask.epochs), self._indices(client)
            plan, state = self._received(plan, state_folder, store)
            offered, place = plan, (self.settings.seed, "own", plan.round, client)
            chosen, plan = self._choose(offered, client, indices, state, _nothing)
            if plan.candidate_arrays and ask.epochs and self.client_strategy.selects_by_state:
                start_layers = self.client_strategy.load_start(self.method, plan, state)
                self._train(training, plan, indices, torch_generator(*place, "first"), _nothing)
                state = self.client_strategy.state_to_save(self.method, plan, start=start_layers, state=state)
                chosen, plan = self._choose(offered, client, indices, state, _nothing)
            seed_torch(derive_seed(*place), self.device)
            load_layers(self.method, self.client_strategy.personalized_model(self.method, plan, state))
            if ask.adapted:
                self._train(training, plan, indices, torch_generator(*place), _nothing)
            names = [
                name
                for name in self.method.named_tensors
                if name.startswith("encoder.") and name not in self.method.inactive_names
            ]
            return ClientUpdate(layers=copy_layers(self.method, names), partition_id=client, model_index=chosen)

    def _received(self, plan: TrainPlan, state_folder: Path, store: StateStore) -> tuple[TrainPlan, ClientState | None]:
        """Return the plan with the client's cached layers, and its state. Broadcast parts are loaded."""
        state = store.load(state_folder, before=plan.round, template=self.method.named_tensors)
        plan = self._add_cached_frozen(plan, state, state_folder / "frozen")
        plan = self._add_cached_static(plan, state_folder / "constant")
        load_layers(self.method, plan.broadcast)
        return plan, state

    def _choose(
        self,
        plan: TrainPlan,
        client: int,
        indices: torch.Tensor,
        state: ClientState | None,
        on_step_start: Callable[[], None],
    ) -> tuple[int, TrainPlan]:
        """Return the index of the selected model, and the plan with its layers."""
        if not plan.candidate_arrays:
            return 0, plan
        if any(layers.keys() != plan.layers.keys() for layers in plan.candidate_arrays):
            raise RequestRefused("the models of the plan are not of the same layers")
        plans = [replace(plan, layers=layers) for layers in (plan.layers, *plan.candidate_arrays)]
        place = (self.settings.seed, "choose", plan.round, client)
        local_data = LocalDataSample(
            self.images,
            indices,
            data=self.settings.data,
            training=self.training,
            place=place,
            labels=self.labels,
            on_step_start=on_step_start,
        )
        chosen = self.client_strategy.select_model(self.method, plans, state, local_data)
        return chosen, replace(plans[chosen], candidate_arrays=plan.candidate_arrays)

    def _add_cached_frozen(self, plan: TrainPlan, state: ClientState | None, folder: Path) -> TrainPlan:
        """Return the plan with frozen layers that the client cached in an earlier round.

        Raises
        ------
        RequestRefused
            A layer of the model is missing.
        """
        if plan.num_frozen_stages:
            before = load_state(folder, before=plan.round, template=self.method.named_tensors) or {}
            plan = replace(plan, layers={name: value.numpy() for name, value in before.items()} | plan.layers)
        absent = set(exchanged_names(self.method)) - plan.layers.keys() - (state or {}).keys()
        if absent:  # the model contains another client's
            raise RequestRefused(f"the plan lacks {len(absent)} layers of the model, such as {min(absent)}")
        return plan

    def _add_cached_static(self, plan: TrainPlan, folder: Path) -> TrainPlan:
        """Return the plan with static parts of the method that the client cached in an earlier round.

        Raises
        ------
        RequestRefused
            A layer of these parts is missing.
        """
        wanted = set(names_in_parts(self.method, self.method.broadcast_parts))
        if wanted <= plan.broadcast.keys():
            return plan
        before = load_state(folder, before=plan.round, template=self.method.named_tensors) or {}
        plan = replace(plan, broadcast={name: value.numpy() for name, value in before.items()} | plan.broadcast)
        absent = wanted - plan.broadcast.keys()
        if absent:
            raise RequestRefused(
                f"the plan lacks {len(absent)} layers of the method's server side, such as {min(absent)}"
            )
        return plan

    def _indices(self, client: int) -> torch.Tensor:
        """Return the indices of the client's images."""
        return (
            torch.arange(len(self.images))
            if self.client_indices is None
            else torch.from_numpy(np.asarray(self.client_indices[client]))
        )

    def _train_again(
        self,
        plan: TrainPlan,
        own: torch.Tensor,
        place: tuple[int, str, int, int],
        on_step_start: Callable[[], None],
        term: Regularizer,
    ) -> None:
        """Repeat the training with the same random numbers and an additional regularizer."""
        seed_torch(derive_seed(*place), self.device)
        training = replace(self.training, regularizer=CombinedRegularizer(self.training.regularizer, term))
        self._train(training, plan, own, torch_generator(*place), on_step_start)

    def _train(
        self,
        training: LocalTrainer,
        plan: TrainPlan,
        own: torch.Tensor,
        generator: torch.Generator,
        on_step_start: Callable[[], None],
    ) -> TrainResult:
        if len(own) < self.method.min_batch_size:
            raise RequestRefused(
                f"{type(self.method).__name__} learns nothing from fewer than {self.method.min_batch_size} images, "
                f"and the client has {len(own)}"
            )
        training.reset_optimizer(lr_factor=plan.lr_factor)
        result = train(
            self.method,
            self.images,
            own,
            training=training,
            generator=generator,
            labels=self.labels,
            on_step_start=on_step_start,
        )
        if training.epochs and not math.isfinite(result.loss):
            raise RequestRefused(f"training diverged: loss={result.loss}; the client's previous state was kept")
        return result


@functools.lru_cache(maxsize=1)
def worker_for(settings: ClientSettings) -> ClientWorker:
    """Return this process's worker for these settings."""
    return ClientWorker(settings)


def _nothing() -> None:
    """Set no limit."""
