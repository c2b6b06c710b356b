"""Local training: epochs of a self-supervised method on one client's images, or on the server's images."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedssl.augmentation import Augmentation
from fedssl.config.settings import TrainingSettings
from fedssl.datasets.images import ImageSource
from fedssl.machine.cuda_graphs import CudaGraphCache, captures_steps
from fedssl.machine.devices import check_cuda_features, check_precision, is_gpu, to_device
from fedssl.machine.process import optimizer_step
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import check_loaded
from fedssl.optimizers.base import SeveralPasses
from fedssl.regularizers.base import CombinedRegularizer, Regularizer, RegularizerInput
from fedssl.training_checks import check_loss, check_regularizer, check_views
from fedssl.views import Views

Augment = Callable[[Tensor, torch.Generator], Views]


@dataclass(frozen=True, kw_only=True)
class LocalTrainer:
    """Training of a method; used by clients, calibration and cost measurement."""

    augment: Augmentation
    optimizer: torch.optim.Optimizer  # of all parameters that the method trains in any phase
    base_options: tuple[dict[str, Any], ...]  # of the optimizer's groups before the first step, without their weights
    regularizer: Regularizer
    epochs: int
    batch_size: int  # maximum number of images per step, see `batches`
    precision: str  # "fp32" or "bf16"; bf16 runs the forward pass under autocast
    clip_norm: float | None  # maximum gradient norm (2-norm over all trained weights); None disables clipping
    channels_last: bool  # memory format of views, which is fastest for convolutions
    graphs: CudaGraphCache | None = None  # replays the steps on a GPU; None launches every kernel separately

    @classmethod
    def build(cls, settings: TrainingSettings, method: SSLMethod, *, term: Regularizer | None = None) -> "LocalTrainer":
        """Build the parts for a method, whose weights are converted to the views' memory format on a GPU.

        ``term`` is that of the strategy.
        """
        regularizer = with_term(settings.regularizer.make(Regularizer), term)
        augment = settings.augmentation.make(Augmentation)
        check_views(augment, method)
        check_regularizer(regularizer, method, augment, term=term)
        if regularizer.uses_initial_encoder:
            method.keep_initial_encoder()
        device = next(method.parameters()).device
        check_precision(settings.precision, device)
        if is_gpu(device):  # CPUs among the devices of a run ignore these settings
            check_cuda_features(settings, device)
        if settings.channels_last and is_gpu(device):
            method.to(memory_format=torch.channels_last)  # else every convolution would convert its weights
        captured = captures_steps(settings.cuda_graphs, settings.optimizer.values, (method, *regularizer.terms), device)
        trained = [method.named_tensors[name] for name in method.trainable]
        optimizer = settings.optimizer.instantiate(trained, **({"fused": True} if captured else {}))
        return cls(
            augment=augment,
            optimizer=optimizer,
            base_options=options_of(optimizer),
            regularizer=regularizer,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            precision=settings.precision,
            clip_norm=settings.clip_norm,
            channels_last=settings.channels_last,
            graphs=CudaGraphCache(optimizer, required=bool(settings.cuda_graphs)) if captured else None,
        )

    @property
    def parts(self) -> tuple[object, ...]:
        """Return the objects besides the method that training calls, which may be of users' classes."""
        return *self.regularizer.terms, self.optimizer, self.augment

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the autocast context of forward passes."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def reset_optimizer(self, *, lr_factor: float) -> None:
        """Reset the optimizer's state, its options, in which some keep state, too, and set its learning rates.

        Captured steps have the options of their capture.
        """
        lrs = [options["lr"] * lr_factor for options in self.base_options]
        if self.graphs is not None:
            self.graphs.reset_optimizer(lrs)
            return
        self.optimizer.state.clear()
        for group, options, lr in zip(self.optimizer.param_groups, self.base_options, lrs, strict=True):
            weights = group["params"]
            group.clear()
            group.update(_copied(options, weights), params=weights, lr=lr)

    def free_training_memory(self) -> None:
        """Free the gradients and the optimizer's state, whose memory CUDA graphs use again."""
        if self.graphs is None:
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.state.clear()


def options_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Return copies of the options of the optimizer's groups, without their weights."""
    groups = [
        (group["params"], {key: group[key] for key in group if key != "params"}) for group in optimizer.param_groups
    ]
    return tuple(_copied(options, weights) for weights, options in groups)


def _copied(options: Mapping[str, Any], weights: Sequence[Tensor]) -> dict[str, Any]:
    """Return copies of options, with the weights themselves; what cannot be copied is the same object."""
    copies = {}
    for key, value in options.items():
        try:
            copies[key] = copy.deepcopy(value, {id(weight): weight for weight in weights})
        except (TypeError, RuntimeError):
            copies[key] = value
    return copies


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """The steps of an optimizer in one training, whose learning rate is constant."""

    number: int
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, *, number: int) -> "LocalSteps":
        """Return so many steps of an optimizer, whose parameters are one group."""
        group = optimizer.param_groups[0]
        return cls(
            number=number,
            lr=float(group["lr"]),
            momentum=group.get("momentum", 0.0),
            dampening=group.get("dampening", 0.0),
            nesterov=group.get("nesterov", False),
        )

    @property
    def norm(self) -> float:
        """Return ||a||_1 of SGD, whose steps change weights by ``-lr sum_k a_k g_k`` with the gradients g_k.

        It is the number of steps without momentum.
        """
        velocity = total = 0.0
        for step in range(self.number):  # on a gradient of 1
            before = velocity
            velocity = self.momentum * velocity + (1 - self.dampening if step else 1)
            way = 1 + self.momentum * velocity if self.nesterov else velocity
            if velocity == before:  # and so in all steps that follow
                return total + (self.number - step) * way
            total += way
        return total


@dataclass(frozen=True)
class TrainResult:
    """Mean loss per image over the last epoch (NaN without epochs), with the regularizer, and number of images."""

    loss: float
    num_examples: int


def train(
    method: SSLMethod,
    images: ImageSource,
    indices: Tensor,
    *,
    training: LocalTrainer,
    generator: torch.Generator,
    labels: Tensor | None = None,
    on_step_start: Callable[[], None] = lambda: None,
) -> TrainResult:
    """Train ``method`` in place.

    Random parameters of views are drawn at the start of an epoch. The loss stays on the device until the end: one
    synchronization per call, unless the regularizer synchronizes.

    Parameters
    ----------
    images : ImageSource
        All images of the data set, on the device of the method or on the CPU. They are read ahead of the steps.
    indices : Tensor
        Indices of the client's images ``(m,)``, int64, on the CPU.
    training : LocalTrainer
        Training parts. The optimizer keeps its state; see `LocalTrainer.reset_optimizer`.
    generator : torch.Generator
        CPU generator of all random numbers of this training.
    labels : Tensor or None
        Classes of all images ``(n,)``, int64, on the method's device; required by methods that use them.
    on_step_start : callable
        Called before every step; an exception that it raises ends the training.
    """
    check_loaded(method)
    method.train()
    training.regularizer.on_train_start(method)
    step = partial(_step, method, training, generator)
    graphs = training.graphs if training.regularizer.cuda_graph_safe else None
    device = next(method.parameters()).device
    layout = torch.channels_last if training.channels_last else torch.contiguous_format
    epoch_loss = torch.zeros((), device=device)
    targets = method.targets(images, indices, on_step_start=on_step_start)
    for _ in range(training.epochs):
        epoch_loss.zero_()
        epoch = list(batches(indices, training.batch_size, generator=generator, min_batch_size=method.min_batch_size))
        sizes = [len(batch) for batch in epoch]
        params = training.augment.sample_params(sizes, image_shape=images.shape[1:], device=device, generator=generator)
        batch_indices = to_device(torch.cat(epoch), images.device)
        classes = () if labels is None else index_rows(labels, batch_indices, device).split(sizes)
        batch_images = images.prefetch(batch_indices.split(sizes))
        for number, (batch, batch_params) in enumerate(zip(batch_images, params, strict=True)):
            on_step_start()
            batch = on_device(batch, device)
            views = training.augment.apply(batch, batch_params, layout=layout)
            if targets is not None:
                views = replace(views, targets=targets(epoch[number], batch))
            with training.autocast(device):
                views = method_inputs(method, views, classes[number] if classes else None, generator)
            loss = step(views) if graphs is None else graphs.run(step, views, constants=method.step_constants)
            epoch_loss += loss * (len(batch) / len(indices))
    return TrainResult(loss=epoch_loss.item() if training.epochs else float("nan"), num_examples=len(indices))


def method_inputs(method: SSLMethod, views: Views, labels: Tensor | None, generator: torch.Generator) -> Views:
    """Return the argument of `SSLMethod.loss`; frozen stages of the encoder are applied to all views."""
    views = replace(method.inputs(views), labels=labels if method.uses_labels else None)
    return views.with_images(method.encoder.forward_frozen(views.images, generator)) if method.frozen else views


def _step(method: SSLMethod, training: LocalTrainer, generator: torch.Generator, views: Views) -> Tensor:
    """Run one optimizer step on the argument of `SSLMethod.loss`; return the loss with the regularizer, detached."""
    optimizer, regularizer = training.optimizer, training.regularizer

    def backward() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with training.autocast(views[0].images.device):
            with capture_outputs(method, regularizer.resolve_part(method)) as outputs:
                loss = method.loss(views)
            check_loss(loss, method, has_gradient=False)
            owners = regularizer.terms if loss.requires_grad else [method]
            z = [rows for output in outputs for rows in output.split(views.num_images)][: regularizer.num_views]
            loss = regularizer.apply(loss, RegularizerInput(method, views, tuple(z), generator))
            check_loss(loss, *owners)
        loss.backward()
        method.saved_buffers.keep()
        if training.clip_norm is not None:
            trained = [parameter for parameter in method.parameters() if parameter.requires_grad]
            torch.nn.utils.clip_grad_norm_(trained, training.clip_norm)
        return loss.detach()

    if isinstance(optimizer, SeveralPasses):
        own = [value for part in (*method.modules(), *regularizer.terms) for value in vars(part).values()]
        generators = [generator, *(value for value in own if isinstance(value, torch.Generator))]
        loss = optimizer.compute_gradient(backward, list(method.buffers()), generators)
    else:
        loss = backward()
    optimizer_step(optimizer)
    method.on_step_end()
    method.saved_buffers.keep()
    return loss


def with_term(regularizer: Regularizer, term: Regularizer | None) -> Regularizer:
    """Return a regularizer with the term of a strategy added; the regularizer itself without one."""
    return regularizer if term is None else CombinedRegularizer(regularizer, term)


def index_rows(source: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Return rows of a tensor on the device; ``rows`` is on the device of the tensor or on the CPU."""
    return on_device(source.index_select(0, rows.to(source.device)), device)


def on_device(batch: Tensor, device: torch.device) -> Tensor:
    """Return a batch on the CPU or the device on the device."""
    return batch if batch.device == device else to_device(batch, device)


@contextmanager
def capture_outputs(method: SSLMethod, part: str | None) -> Iterator[list[Tensor]]:
    """Collect the outputs of a part of the method inside the block, one per forward pass; None collects nothing."""
    outputs: list[Tensor] = []
    if part is None:
        yield outputs
        return
    handle = method.get_submodule(part).register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def batches(
    indices: Tensor, batch_size: int, *, generator: torch.Generator, min_batch_size: int = 2
) -> Iterator[Tensor]:
    """Yield the indices in random order, split into `number_of_batches` batches whose sizes differ by at most 1."""
    order = indices[torch.randperm(len(indices), generator=generator)]
    yield from order.tensor_split(number_of_batches(len(order), batch_size, min_batch_size=min_batch_size))


def number_of_batches(num_images: int, batch_size: int, *, min_batch_size: int = 2) -> int:
    """Return ``ceil(num_images / batch_size)``, or fewer to avoid batches smaller than ``min_batch_size``."""
    return max(1, min(-(-num_images // batch_size), num_images // min_batch_size))
