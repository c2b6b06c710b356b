"""Orchestra (Lubana et al., ICML 2022, arXiv 2205.11506): the federation agrees on clusters of all its images.

Clusters are directions C in the space of projections. A client learns to assign one view of an image as its target
network assigns the other, and, against collapse, to tell by how much an image was turned. At the end of a round it
clusters the newest projections of its target network; its L local centroids go up, the server clusters those of all
clients (`Orchestra.aggregate_parts`), and the G centroids found there come down as the clusters of the next round. Clusters of
equal size keep all images from ending in one. Everything else is aggregated, by whatever strategy; the authors' is
FedAvg.

Where this differs from the authors' code:

- they begin with a round without training, in which clients only cluster. Here the first centroids are zero: all
  clusters are alike, the consistency term is constant and has no gradient, and round 1 learns from turned images
  alone;
- their target networks travel and are averaged (``target="average"``); here they stay with the client by default, like
  the memory, which begins anew with them;
- their memory begins with random numbers and ends in the client's object, which every round makes anew; here it begins
  empty and stays with the client;
- what is turned is view 1, theirs is a third view; to regularizers it is the first of the two views;
- an image of a batch is turned by as many quarters as its position, modulo 4, instead of at random: positions are
  random already, and all four angles come equally often;
- the target network moves after a step, not before the next one, which is the same but for a round's first step;
- local clustering begins with projections far from each other instead of random ones;
- they fit the global centroids by 500 steps of gradient descent to the assignment of Sinkhorn-Knopp, from those of the
  round before; here they come from the same k-means with Sinkhorn-Knopp as the local ones, which has no random numbers
  and takes milliseconds;
- they weigh clients by numbers of batches, FedAvg here by images.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.arrays import Layers
from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.methods.clustering import equal_clusters, global_centroids
from fedssl.methods.heads import MLP
from fedssl.methods.momentum import EMATargetMethod

LOCAL, GLOBAL = "local_centroids", "centroids"


def consistency(z: Tensor, target: Tensor, centroids: Tensor, *, temperature: float) -> Tensor:
    """Cross entropy of one view's assignment to clusters with the target's assignment of the other view.

    With p(z) the softmax over the centroids c of ``cos(z, c) / temperature``, the mean over images of
    ``-sum_c p(target)_c log p(z)_c``.

    Parameters
    ----------
    z : Tensor
        Projections of the online network, ``(batch, dim)``; need not be normalized. The gradient flows into them only.
    target : Tensor
        Projections of the target network from the other view, ``(batch, dim)``; need not be normalized.
    centroids : Tensor
        Unit vectors, or all zeros, ``(clusters, dim)``.
    temperature : float
        Positive; small values make assignments hard.

    Returns
    -------
    Tensor
        Scalar >= 0; log(clusters) for centroids of zeros.
    """
    with torch.autocast(z.device.type, enabled=False):
        own, other = (F.normalize(x.to(centroids.dtype), dim=1) @ centroids.T / temperature for x in (z, target))
    return F.cross_entropy(own, other.detach().softmax(dim=1))


def rotate_quarters(images: Tensor) -> Tensor:
    """Image i turned counter-clockwise by i modulo 4 quarters.

    Parameters
    ----------
    images : Tensor
        ``(batch, channels, size, size)``.

    Returns
    -------
    Tensor
        Like ``images``.
    """
    turned = images.clone()
    for quarters in (1, 2, 3):
        turned[quarters::4] = images[quarters::4].rot90(quarters, (2, 3))
    return turned


class Orchestra(EMATargetMethod):
    """Orchestra's client: online and target networks, a layer that tells turns, a memory and the centroids.

    Beside the networks' its parts are ``rotation``, ``memory`` ``(memory_size, dim)`` (newest first; a row of zeros is
    empty), ``local_centroids`` ``(local_clusters, dim)`` and ``centroids`` ``(global_clusters, dim)``.

    Parameters
    ----------
    local_clusters, global_clusters : int
        L of every client, and G of the federation; at least 1 and 2.
    memory_size : int
        How many of the newest projections of its target network a client clusters; at least ``local_clusters``.
    temperature : float
        Of the assignments to clusters; positive.
    encoder, projector, ema_decay, target
        As in `EMATargetMethod`.

    Raises
    ------
    InputError
        A number is out of range.
    """

    local_parts = (*EMATargetMethod.local_parts, "memory")
    uploaded_parts = (LOCAL,)
    broadcast_parts = (GLOBAL,)

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        local_clusters: int,
        global_clusters: int,
        memory_size: int,
        temperature: float,
        ema_decay: float,
        target: str = "keep",
    ) -> None:
        _check(local_clusters, global_clusters, memory_size, temperature)
        super().__init__(encoder, projector=projector, ema_decay=ema_decay, target=target)
        dim = self.projector.out_features
        self.rotation = nn.Linear(dim, 4)
        self.temperature = temperature
        self.memory: Tensor
        self.local_centroids: Tensor
        self.centroids: Tensor
        self.register_buffer("memory", torch.zeros(memory_size, dim))
        self.register_buffer("local_centroids", torch.zeros(local_clusters, dim))
        self.register_buffer("centroids", torch.zeros(global_clusters, dim))

    def inputs(self, view1: Tensor, view2: Tensor) -> tuple[Tensor, ...]:
        return view1, view2, rotate_quarters(view1)

    def loss(self, view1: Tensor, view2: Tensor, turned: Tensor | None = None) -> Tensor:
        """The loss; ``turned`` is what `rotate_quarters` made of view 1, None: it is made here."""
        turned = rotate_quarters(view1) if turned is None else turned
        quarters = torch.arange(len(turned), device=turned.device) % 4
        rotation = F.cross_entropy(self.rotation(self.projector(self.encoder(turned))).float(), quarters)
        z2 = self.projector(self.encoder(view2))
        with torch.no_grad():
            target1 = self.target_projector(self.target_encoder(view1))
        self.enqueue(target1)
        return consistency(z2, target1, self.centroids, temperature=self.temperature) + rotation

    @torch.no_grad()
    def enqueue(self, projections: Tensor) -> None:
        """Put projections ``(batch, dim)``, normalized, in front of the memory, from whose end the oldest fall off."""
        newest = F.normalize(projections.to(self.memory.dtype), dim=1)
        self.memory.copy_(torch.cat((newest, self.memory))[: len(self.memory)])

    def start_round(self, *, first: bool) -> None:
        super().start_round(first=first)
        if first:
            self.memory.zero_()

    @torch.no_grad()
    def end_round(self) -> None:
        memory = self.memory.cpu()  # where many small operations are fastest
        projections = memory[memory.any(dim=1)]
        if len(projections):  # none without a local epoch
            self.local_centroids.copy_(equal_clusters(projections, clusters=len(self.local_centroids)))

    def aggregate_parts(self, uploaded: Sequence[Layers], broadcast: Layers) -> Layers:
        local = torch.from_numpy(np.concatenate([layers[LOCAL] for layers in uploaded]))
        return {GLOBAL: global_centroids(local, old=torch.from_numpy(broadcast[GLOBAL])).numpy()}


def _check(local_clusters: int, global_clusters: int, memory_size: int, temperature: float) -> None:
    if local_clusters < 1:
        raise InputError(f"method.local_clusters={local_clusters} must be at least 1; the authors use 16")
    if global_clusters < 2:
        raise InputError(f"method.global_clusters={global_clusters} must be at least 2; the authors use 128")
    if memory_size < local_clusters:
        raise InputError(
            f"method.memory_size={memory_size} must be at least method.local_clusters={local_clusters}; "
            "the authors use 128"
        )
    if temperature <= 0:
        raise InputError(f"method.temperature={temperature} must be positive; the authors use 0.1")
