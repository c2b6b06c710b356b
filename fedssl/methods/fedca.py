"""FedCA (Zhang et al., *Federated Unsupervised Representation Learning*, arXiv 2010.08982): SimCLR in a federation.

FedCA adds two components to SimCLR's loss. The *dictionary*: clients upload normalized projections of some of their
images, and the server broadcasts all of them as additional negatives. The *alignment*: local representations stay close
to those of a base model, the teacher, which was trained on public images.

There is no public code. These choices are ours:

- A client uploads its first projections of the round's training, of view 1. They come from the downloaded model or a
  few steps later. The last projections would come from models that have drifted apart, and training would then separate
  models instead of images (docs/learning.md).
- The server keeps the newest projections in a queue (`enqueue`). With ``dictionary_capacity`` equal to
  ``clients_per_round`` times ``sent_per_round`` the queue is the union of the last round; a longer queue also holds
  projections of older models.
- A client's own entries are among its negatives, because the server does not know which client uploaded which entry.
- The alignment is the squared distance of normalized representations of the same view of the client's own images.
- The teacher has the architecture of the run's encoder and is downloaded once, see `SSLMethod.static_parts`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.arrays import Layers
from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.losses import nt_xent, teacher_distance
from fedssl.methods.base import TEACHER
from fedssl.methods.heads import MLP, ProjectorMethod
from fedssl.tuning import plain_copy
from fedssl.views import Views

LOCAL_DICTIONARY, DICTIONARY = "local_dictionary", "dictionary"


def enqueue(queue: np.ndarray, newest: Sequence[np.ndarray]) -> np.ndarray:
    """Insert vectors at the front of a queue of unit vectors and drop the oldest from its end.

    ``queue`` is ``(dictionary_capacity, dim)``; rows of zeros are empty. ``newest`` are the vectors of each client,
    ``(n, dim)``; normalized here, because clients are not trusted. Their rows of zeros are ignored. Of more vectors
    than the queue has rows, those at equal distances are inserted, so that all clients have some.
    """
    rows = np.concatenate(newest).astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = (rows / np.where(norms > 0, norms, 1)).astype(queue.dtype)
    unit = unit[norms[:, 0] > 0]
    if len(unit) > len(queue):
        unit = unit[np.arange(len(queue)) * len(unit) // len(queue)]
    return np.concatenate([unit, queue])[: len(queue)]


class FedCA(ProjectorMethod):
    r"""FedCA: SimCLR's encoder and projector, a dictionary of additional negatives, and a teacher.

    Besides the networks its parts are ``local_dictionary`` ``(sent_per_round, dim)`` and ``dictionary``
    ``(dictionary_capacity, dim)`` (newest first), in which rows of zeros are empty, and ``teacher``, a frozen encoder
    in eval mode. Parts of a disabled component do not exist. Both views are concatenated into one forward pass.

    $$
    \mathcal{L} = -\frac{1}{2n} \sum_{i=1}^{2n} \log \frac{\exp(\cos(z_i, z_{j(i)}) / \tau)}
    {\sum_{k \ne i} \exp(\cos(z_i, z_k) / \tau) + \sum_{d \in D} \exp(\cos(z_i, d) / \tau)}
    + \frac{\lambda}{2n} \sum_{i=1}^{2n} \left\lVert \frac{h_i}{\lVert h_i \rVert} -
    \frac{t_i}{\lVert t_i \rVert} \right\rVert^2
    $$

    $$
    D \leftarrow (U_1, \dots, U_K, D)_{1 \dots Q}
    $$

    with $z_i$ the projections of the 2n views, j(i) the other view of i, D the dictionary, $h_i$ and $t_i$ the
    representations by the encoder and by the teacher, $\lambda$ the ``alignment_weight``, $U_k$ the normalized
    projections that client k sends, and Q the ``dictionary_capacity``.
    """

    equal_global_sizes = True

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        temperature: float,
        sent_per_round: int,
        dictionary_capacity: int,
        alignment_weight: float,
    ) -> None:
        if dictionary_capacity < sent_per_round:
            raise InputError(
                f"method.dictionary_capacity={dictionary_capacity} must be at least "
                f"method.sent_per_round={sent_per_round}; "
                "clients_per_round times sent_per_round holds the projections of one round"
            )
        super().__init__(encoder, projector=projector)
        self.temperature = temperature
        self.alignment_weight = alignment_weight
        self.local_dictionary: Tensor
        self.dictionary: Tensor
        if sent_per_round:
            dim = self.projector.out_features
            self.register_buffer(LOCAL_DICTIONARY, torch.zeros(sent_per_round, dim))
            self.register_buffer(DICTIONARY, torch.zeros(dictionary_capacity, dim))
            self.uploaded_parts, self.broadcast_parts = (LOCAL_DICTIONARY,), (DICTIONARY,)
            self.cuda_graph_safe = False  # write position and number of negatives change from step to step
        self.teacher: nn.Module | None = None
        if alignment_weight:
            teacher = plain_copy(encoder).requires_grad_(False).eval()
            teacher.adapters.clear()  # they belong to the tuning of this run
            self.teacher = teacher
            self.broadcast_parts, self.static_parts = (*self.broadcast_parts, TEACHER), (TEACHER,)
        self._negatives: Tensor | None = None
        self._filled: Tensor  # number of rows; a buffer, because SAM's second pass must find it as the first one did
        self.register_buffer("_filled", torch.zeros((), dtype=torch.int64), persistent=False)

    def loss(self, views: Views) -> Tensor:
        both = torch.cat(views.images)
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
        """Normalize projections ``(batch, dim)`` and store them in the free rows of the local dictionary."""
        dictionary = self.local_dictionary
        rows = F.normalize(projections.to(dictionary.dtype), dim=1)
        numbers = torch.arange(len(dictionary), device=rows.device) - self._filled  # from the first free row
        is_new = (numbers >= 0) & (numbers < len(rows))
        dictionary.copy_(torch.where(is_new[:, None], rows[numbers.clamp(0, len(rows) - 1)], dictionary))
        self._filled += len(rows)

    def start_round(self, *, first: bool) -> None:
        if self.uploaded_parts:
            self.local_dictionary.zero_()
            self._filled.zero_()
            # Once per round, because boolean indexing synchronizes with the device.
            self._negatives = self.dictionary[self.dictionary.any(dim=1)]

    def aggregate_parts(self, uploaded: Sequence[Layers], broadcast: Layers) -> Layers:
        if not self.uploaded_parts:
            return {}
        return {DICTIONARY: enqueue(broadcast[DICTIONARY], [layers[LOCAL_DICTIONARY] for layers in uploaded])}
