"""FedCA (Zhang et al., *Federated Unsupervised Representation Learning*, arXiv 2010.08982): SimCLR in a federation.

Two things are added to SimCLR's loss. The *dictionary*: clients send normalized projections of some of their images,
the server shares those of all, and they are further negatives of every client's images. The *alignment*: local
representations stay near those of a base model, the teacher, which was trained on public images before.

There is no public code. What follows is this project's choice:

- a client sends its first projections of the round's training, of the first view: they are made by the model that all
  clients received, or few steps later. Its last ones would be made by models that have drifted apart, which training
  tells apart in place of images (docs/learning.md);
- the server keeps the newest of all in a queue (`enqueue`). With ``entries`` equal to clients_per_round times
  ``dictionary_size`` it is the union of the last round; more of them are of older models;
- a client's own entries are among its negatives, because nobody tells the server which are whose;
- the alignment is the squared distance of normalized representations of the same view of the client's own images;
- the teacher has the architecture of the run's encoder and travels once, see `SSLMethod.constant`.
"""

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.arrays import Layers
from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.losses import at_least_float32, nt_xent
from fedssl.methods.base import TEACHER, SSLMethod
from fedssl.methods.heads import MLP

LOCAL, GLOBAL = "local_dictionary", "dictionary"


def teacher_distance(h: Tensor, teacher_features: Tensor) -> Tensor:
    """Mean squared distance of normalized representations, ``|h / |h| - t / |t||^2``.

    Parameters
    ----------
    h, teacher_features : Tensor
        Of the same images, ``(batch, dim)``; need not be normalized. The gradient flows into ``h`` only.

    Returns
    -------
    Tensor
        Scalar in [0, 4]; 0 for the same directions.
    """
    own, other = (F.normalize(at_least_float32(x), dim=1) for x in (h, teacher_features.detach()))
    return (own - other).square().sum(dim=1).mean()


def enqueue(queue: np.ndarray, newest: Sequence[np.ndarray]) -> np.ndarray:
    """A queue of unit vectors after more have come: the newest in front, the oldest fall off the end.

    Parameters
    ----------
    queue : ndarray
        ``(entries, dim)``; rows of zeros are empty.
    newest : sequence of ndarray
        Of each client, ``(n, dim)``. Rows are normalized here, whoever sent them; those of zeros are no entries.

    Returns
    -------
    ndarray
        Like ``queue``.
    """
    rows = np.concatenate(newest).astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = (rows / np.where(norms > 0, norms, 1)).astype(queue.dtype)
    return np.concatenate([unit[norms[:, 0] > 0], queue])[: len(queue)]


class FedCA(SSLMethod):
    """An encoder and a projector trained as by SimCLR, a dictionary of further negatives, and a teacher.

    Beside the networks its parts are ``local_dictionary`` ``(dictionary_size, dim)``, ``dictionary`` ``(entries, dim)``
    (newest first), in both of which a row of zeros is empty, and ``teacher``, a frozen encoder in eval mode. Without a
    dictionary, or without alignment, the parts of it are not there. Both views go through the network concatenated.

    Parameters
    ----------
    encoder : Encoder
        Trained in place.
    projector : callable
        Makes the projector from the length of a representation, e.g. ``partial(MLP, hidden=512, out=128)``.
    temperature : float
        Of the contrastive loss; positive.
    dictionary_size : int
        How many projections a client sends in a round; 0: there is no dictionary.
    entries : int
        Of the dictionary; at least ``dictionary_size``.
    alignment_weight : float
        Of `teacher_distance` to the teacher, >= 0; 0: there is no teacher.

    Raises
    ------
    InputError
        A number is out of range.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        temperature: float,
        dictionary_size: int,
        entries: int,
        alignment_weight: float,
    ) -> None:
        _check(temperature, dictionary_size, entries, alignment_weight)
        super().__init__()
        self.encoder = encoder
        self.projector = projector(encoder.feature_dim)
        self.temperature = temperature
        self.alignment_weight = alignment_weight
        self.local_dictionary: Tensor
        self.dictionary: Tensor
        if dictionary_size:
            dim = self.projector.out_features
            self.register_buffer(LOCAL, torch.zeros(dictionary_size, dim))
            self.register_buffer(GLOBAL, torch.zeros(entries, dim))
            self.uploaded_parts, self.broadcast_parts = (LOCAL,), (GLOBAL,)
            self.cuda_graph_safe = False  # where projections go, and how many negatives there are, differs
        self.teacher: nn.Module | None = None
        if alignment_weight:
            self.teacher = copy.deepcopy(encoder).requires_grad_(False).eval()
            self.broadcast_parts, self.static_parts = (*self.broadcast_parts, TEACHER), (TEACHER,)
        self._negatives: Tensor | None = None
        self._filled = 0

    def train(self, mode: bool = True) -> "FedCA":
        """Set training mode of what is trained; the teacher stays in eval mode."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def loss(self, view1: Tensor, view2: Tensor) -> Tensor:
        both = torch.cat((view1, view2))
        h = self.encoder(both)
        z1, z2 = self.projector(h).chunk(2)
        if self.uploaded_parts:
            self.store_projections(z1)
        loss = nt_xent(z1, z2, temperature=self.temperature, negatives=self._negatives)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            teacher_features = self.teacher(both)
        return loss + self.alignment_weight * teacher_distance(h, teacher_features)

    @torch.no_grad()
    def store_projections(self, projections: Tensor) -> None:
        """Put projections ``(batch, dim)``, normalized, where there is room among those to be sent."""
        free = self.local_dictionary[self._filled :]
        rows = F.normalize(projections[: len(free)].to(free.dtype), dim=1)
        free[: len(rows)] = rows
        self._filled += len(rows)

    def start_round(self, *, first: bool) -> None:
        if self.uploaded_parts:
            self.local_dictionary.zero_()
            self._filled = 0
            # Once a round, because choosing rows waits for the device.
            self._negatives = self.dictionary[self.dictionary.any(dim=1)]

    def aggregate_parts(self, uploaded: Sequence[Layers], broadcast: Layers) -> Layers:
        if not self.uploaded_parts:
            return broadcast
        return {**broadcast, GLOBAL: enqueue(broadcast[GLOBAL], [layers[LOCAL] for layers in uploaded])}


def _check(temperature: float, dictionary_size: int, entries: int, alignment_weight: float) -> None:
    if not 0 < temperature < math.inf:
        raise InputError(f"method.temperature={temperature} must be positive; SimCLR uses 0.1 to 0.5")
    if dictionary_size < 0:
        raise InputError(f"method.dictionary_size={dictionary_size} must not be negative; 0 turns the dictionary off")
    if entries < max(dictionary_size, 1):
        raise InputError(
            f"method.entries={entries} must be at least method.dictionary_size={dictionary_size} and 1; the union of a "
            "round has clients_per_round times as many"
        )
    if not 0 <= alignment_weight < math.inf:
        raise InputError(
            f"method.alignment_weight={alignment_weight} must be a number from 0 on; 0 turns the alignment off"
        )
