"""Fine-tuning: encoder and a linear classifier are trained together on a share of the labels.

What FedU and FedU2 call semi-supervised evaluation, and with all labels how the papers transfer to other data. The
encoder of the run is copied and stays as it is. Fine-tuning an untrained encoder, which the comparison at the end of a
run has beside the trained one, is training from scratch.

The labelled pictures are drawn within every class (stratified), the same ones for every encoder. Batch normalisation
learns as well. The number is that of the last epoch; test pictures take no part in finding it.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedssl.augmentation import Augmentation
from fedssl.errors import InputError
from fedssl.evaluation.features import accuracy, extract
from fedssl.evaluation.few_labels import check_shares, stratified
from fedssl.evaluation.scores import Score
from fedssl.evaluation.subject import Labelled, Subject
from fedssl.machine.devices import to_device
from fedssl.seeding import derive, numpy_generator, seed_torch, torch_generator
from fedssl.training import batches

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class FineTune:
    """Accuracy as ``fine_tune_<share>_percent``, the mean over draws, with their standard deviation.

    Parameters
    ----------
    shares : sequence of float
        Of the labels of every class; one result for each.
    draws : int
        How often the labelled pictures are drawn.
    epochs, batch_size : int
    optimizer : callable
        Makes one of groups of parameters, each with its learning rate.
    encoder_lr, head_lr : float
        Learning rates of encoder and classifier, at the start; they follow half a cosine down to 0.
    view : mapping
        How pictures are augmented: fields of `fedssl.augmentation.recipe.View`.

    Raises
    ------
    InputError
        A number is out of range.
    """

    def __init__(
        self,
        *,
        shares: Sequence[float],
        draws: int,
        epochs: int,
        batch_size: int,
        optimizer: MakeOptimizer,
        encoder_lr: float,
        head_lr: float,
        view: Mapping[str, Any],
    ) -> None:
        check_shares(shares)
        if not shares:
            raise InputError("shares=[] of fine-tuning needs shares of the labels, e.g. [0.01,0.1,1.0]")
        for name, value, least in (("draws", draws, 1), ("epochs", epochs, 0), ("batch_size", batch_size, 2)):
            if value < least:
                raise InputError(f"{name}={value} of fine-tuning must be at least {least}")
        for name, lr in (("encoder_lr", encoder_lr), ("head_lr", head_lr)):
            if not 0 <= lr < math.inf:
                raise InputError(f"{name}={lr} of fine-tuning must be a number of at least 0")
        self.shares, self.draws, self.epochs, self.batch_size = tuple(shares), draws, epochs, batch_size
        self.optimizer, self.encoder_lr, self.head_lr, self.view = optimizer, encoder_lr, head_lr, view

    def __call__(self, subject: Subject, *, seed: int) -> dict[str, Score]:
        """Judge the subject on the draws of this seed; raw pixels have no network to train."""
        if subject.encoder is None:
            return {}
        results = {}
        for share in self.shares:
            found = [self._accuracy(subject, (seed, "fine tune", f"{share:g}", draw)) for draw in range(self.draws)]
            spread = stdev(found) if len(found) > 1 else None
            results[f"fine_tune_{100 * share:g}_percent"] = Score(mean(found), spread=spread)
        return results

    def _accuracy(self, subject: Subject, place: tuple[int, str, str, int]) -> float:
        rows = stratified(subject.train.labels, share=float(place[2]), generator=numpy_generator(*place))
        few = Labelled(subject.train.images[rows], subject.train.labels[rows])
        encoder = copy.deepcopy(subject.encoder)
        assert encoder is not None
        encoder.to(subject.device).requires_grad_(True)
        test = extract(encoder, subject.test.images[:2], mean=subject.mean, std=subject.std, device=subject.device)
        head = nn.Linear(test.shape[1], subject.num_classes).to(subject.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        seed_torch(derive(*place), subject.device)
        self._train(encoder, head, few, subject, torch_generator(*place))
        test = extract(encoder, subject.test.images, mean=subject.mean, std=subject.std, device=subject.device)
        with torch.inference_mode():
            return accuracy(head(test.to(subject.device)).argmax(dim=1), subject.test.labels)

    def _train(
        self, encoder: nn.Module, head: nn.Module, few: Labelled, subject: Subject, generator: torch.Generator
    ) -> None:
        augment = Augmentation(
            size=few.images.shape[-1], mean=subject.mean, std=subject.std, views=[dict(self.view), {}]
        )
        groups = [(encoder, self.encoder_lr), (head, self.head_lr)]
        optimizer = self.optimizer([{"params": list(part.parameters()), "lr": lr} for part, lr in groups])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(self.epochs, 1))
        encoder.train()
        for _ in range(self.epochs):
            for batch in batches(torch.arange(len(few.labels)), self.batch_size, generator=generator):
                pictures = to_device(few.images[batch], subject.device)
                view, _ = augment(pictures, generator)
                loss = F.cross_entropy(head(encoder(view)), to_device(few.labels[batch], subject.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
