"""Local training: some epochs of a self-supervised method on one client's pictures, or on the server's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedssl.errors import InputError
from fedssl.machine.devices import to_device
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer, Step
from fedssl.settings import TrainingSettings

Augment = Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a method is trained: one value for clients, calibration and the measurement of costs.

    Attributes
    ----------
    augment : callable
        Maps pictures and a generator to two views.
    optimizer : torch.optim.Optimizer
        Over all that the method ever trains.
    lrs : tuple of float
        Learning rates of the optimiser's groups, before any factor.
    regularizer : Regularizer
    epochs : int
    batch_size : int
        Most pictures per step; an epoch is cut into batches of nearly equal size, see `batches`.
    precision : {"fp32", "bf16"}
        bf16 runs the forward pass under autocast.
    clip_norm : float or None
        Longest gradient (2-norm over all trained weights) that is taken as it is; None: any.
    channels_last : bool
        Whether views have all channels of a pixel side by side in memory, which convolutions are fastest on.
    """

    augment: Augment
    optimizer: torch.optim.Optimizer
    lrs: tuple[float, ...]
    regularizer: Regularizer
    epochs: int
    batch_size: int
    precision: str
    clip_norm: float | None
    channels_last: bool

    @classmethod
    def prepare(cls, settings: TrainingSettings, method: SSLMethod) -> "LocalTraining":
        """Build the parts for a method.

        Raises
        ------
        InputError
            A part refuses its settings, or the regulariser needs a part that the method does not have.
        """
        regularizer: Regularizer = settings.regularizer.make()
        part = regularizer.part_of(method)
        if part not in (None, *(name for name, _ in method.named_children())):
            raise InputError(
                f"{type(regularizer).__name__} works on the {part}, which {type(method).__name__} does not "
                "have; set another regularizer or method"
            )
        optimizer = settings.optimizer.make([method.tensors[name] for name in method.trainable])
        return cls(
            augment=settings.augmentation.make(),
            optimizer=optimizer,
            lrs=tuple(group["lr"] for group in optimizer.param_groups),
            regularizer=regularizer,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            precision=settings.precision,
            clip_norm=settings.clip_norm,
            channels_last=settings.channels_last,
        )

    def restart(self, *, lr_factor: float) -> None:
        """Let the optimiser forget what it was used for before, and set its learning rates."""
        self.optimizer.state.clear()
        for group, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):
            group["lr"] = lr * lr_factor


@dataclass(frozen=True)
class TrainResult:
    """Outcome of local training.

    Attributes
    ----------
    loss : float
        Mean loss per picture over the last epoch, regulariser included; NaN if there was no epoch.
    num_examples : int
        Pictures of the client.
    """

    loss: float
    num_examples: int


def train(
    method: SSLMethod,
    images: Tensor,
    indices: Tensor,
    *,
    training: LocalTraining,
    generator: torch.Generator,
    labels: Tensor | None = None,
) -> TrainResult:
    """Train ``method`` in place.

    Parameters
    ----------
    images : Tensor
        All pictures of the data set ``(n, channels, height, width)``, uint8, on the device of the method or on the CPU.
    indices : Tensor
        The client's pictures ``(m,)``, int64, on the CPU.
    training : LocalTraining
        How. Its optimiser goes on from where it is; see `LocalTraining.restart`.
    generator : torch.Generator
        CPU generator of everything random in this training.
    labels : Tensor or None
        Classes of all pictures ``(n,)``, int64, on the method's device; needed by methods that use them.

    Notes
    -----
    The loss stays on the device until the end: one synchronisation per call, if the regulariser needs none (FUR does,
    unless its tolerance is 0).
    """
    method.train()
    regularizer, optimizer = training.regularizer, training.optimizer
    regularizer.start(method)
    device = next(method.parameters()).device
    layout = torch.channels_last if training.channels_last else torch.contiguous_format
    trained = [parameter for parameter in method.parameters() if parameter.requires_grad]
    epoch_loss = torch.zeros((), device=device)
    for _ in range(training.epochs):
        epoch_loss.zero_()
        for batch in batches(indices, training.batch_size, generator=generator, smallest=method.smallest_batch):
            rows = to_device(batch, images.device)
            pictures = images.index_select(0, rows)
            if images.device != device:
                pictures = to_device(pictures, device)
            views = training.augment(pictures, generator)
            view1, view2 = (view.contiguous(memory_format=layout) for view in views)
            inputs = list(method.inputs(view1, view2))
            known = (labels[rows],) if method.uses_labels and labels is not None else ()
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=training.precision == "bf16"):
                if method.frozen:
                    inputs = method.encoder.prefix(inputs, generator)
                with outputs_of(method, regularizer.part_of(method)) as outputs:
                    loss = method.loss(*inputs, *known)
                z1, z2 = outputs if len(outputs) == 2 else outputs[0].chunk(2) if outputs else (None, None)
                loss = regularizer.add_to(loss, Step(method, inputs[0], inputs[1], z1, z2, generator))
            loss.backward()
            if training.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, training.clip_norm)
            optimizer.step()
            method.after_step()
            epoch_loss += loss.detach() * (len(batch) / len(indices))
    return TrainResult(loss=epoch_loss.item() if training.epochs else float("nan"), num_examples=len(indices))


@contextmanager
def outputs_of(method: SSLMethod, part: str | None) -> Iterator[list[Tensor]]:
    """What a part of the method puts out meanwhile, one tensor per forward pass; None: nothing is collected."""
    outputs: list[Tensor] = []
    if part is None:
        yield outputs
        return
    handle = method.get_submodule(part).register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def batches(indices: Tensor, batch_size: int, *, generator: torch.Generator, smallest: int = 2) -> Iterator[Tensor]:
    """One epoch: the indices in random order, cut into `number_of_batches` of nearly equal size.

    Sizes differ by at most 1, so that every picture is seen in every epoch.
    """
    order = indices[torch.randperm(len(indices), generator=generator)]
    yield from order.tensor_split(number_of_batches(len(order), batch_size, smallest=smallest))


def number_of_batches(pictures: int, batch_size: int, *, smallest: int = 2) -> int:
    """``ceil(pictures / batch_size)``, or fewer, so that none has less than ``smallest`` if there are so many pictures.

    An odd number of pictures in batches of 2 therefore makes one of 3.
    """
    return max(1, min(-(-pictures // batch_size), pictures // smallest))
