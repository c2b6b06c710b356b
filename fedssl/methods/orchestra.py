"""Orchestra (Lubana et al., ICML 2022, arXiv 2205.11506): clients learn from one global clustering of all images.

Clusters are directions C in the space of projections. A client learns to assign one view of an image to the same
clusters as its target network assigns the other view. To avoid collapse it also predicts the rotation of an image. At
the end of a round it clusters the newest projections of its target network and uploads its L local centroids. The
server clusters the local centroids of all clients (`Orchestra.aggregate_parts`) and broadcasts the G global centroids,
which are the clusters of the next round. Clusters of equal size prevent a collapse into a single cluster. All other
parts are aggregated by any strategy; the authors use FedAvg.

Equal sizes come from Sinkhorn-Knopp: a soft assignment whose rows sum to 1 and whose columns have equal sums. Each
vector is then assigned to its most likely cluster, and the centroid is the normalized mean of the cluster's vectors.
Sizes are therefore only approximately equal: identical vectors cannot be separated. Centroids depend on the vectors
alone, in float64. The initial ones are vectors far from each other, so the algorithm needs no random numbers and finds
well-separated groups in any order of the vectors.

Differences from the authors' code:

- The authors start with a round in which clients only cluster. Here the first centroids are zero: all clusters are
  equal, the consistency term is constant without gradient, and round 1 learns from rotations alone.
- The authors exchange and average the target networks (``target_init="average"``). Here they stay with the client by
  default, like the memory, which is reset together with them.
- The authors' memory starts with random numbers and is recreated in every round. Here it starts empty and stays with
  the client.
- Here view 1 is rotated; the authors rotate a third view. Regularizers use the rotated view as the first of the two.
- The number of quarter turns of an image is its position in the batch modulo 4 instead of random. Positions are random
  already, and all four angles are equally frequent.
- The target network is updated after a step instead of before the next one, which differs in a round's first step only.
- Local clustering starts with projections far from each other instead of random ones.
- The authors fit the global centroids by 500 steps of gradient descent to the Sinkhorn-Knopp assignment, starting from
  the previous ones. Here the same k-means with Sinkhorn-Knopp computes local and global centroids; it needs no random
  numbers and takes milliseconds.
- The authors weight clients by numbers of batches, FedAvg here by images.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.arrays import Layers
from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.losses import sinkhorn
from fedssl.methods.heads import MLP
from fedssl.methods.momentum import EMATargetMethod
from fedssl.views import View, Views

LOCAL_CENTROIDS, CENTROIDS = "local_centroids", "centroids"
_SHARPNESS = 25.0  # factor of similarities in Sinkhorn-Knopp; a larger one gives a harder assignment
_SINKHORN_ITERATIONS = 10


def farthest_points(points: Tensor, *, count: int) -> Tensor:
    """Select ``count`` unit vectors ``(n, dim)`` that are far from each other, from the least similar to the mean on.

    Each further vector is the one least similar to all selected ones. With a ``count`` above n the selection repeats.
    """
    chosen = [int((points @ points.mean(dim=0)).argmin())]
    nearest = points @ points[chosen[0]]
    while len(chosen) < min(count, len(points)):
        nearest[chosen[-1]] = torch.inf  # selects no vector twice, even among equal ones
        chosen.append(int(nearest.argmin()))
        nearest = torch.maximum(nearest, points @ points[chosen[-1]])
    return points[chosen][torch.arange(count) % len(chosen)]


def equal_clusters(points: Tensor, *, clusters: int, iterations: int = 5) -> Tensor:
    """Compute centroids of clusters of nearly equal size by spherical k-means with `fedssl.losses.sinkhorn`.

    ``points`` are ``(n, dim)``, n >= 1; normalized here. With fewer than ``clusters`` vectors some centroids are equal.
    Each of the ``iterations`` assigns the vectors and computes new centroids; an empty cluster keeps its own. Return
    unit vectors ``(clusters, dim)``, float64.
    """
    points = F.normalize(points.double(), dim=1)
    centroids = farthest_points(points, count=clusters)
    for _ in range(iterations):
        similarity = _SHARPNESS * (points @ centroids.T)
        nearest = sinkhorn(similarity, epsilon=1.0, iterations=_SINKHORN_ITERATIONS).argmax(dim=1)
        sums = F.one_hot(nearest, clusters).double().T @ points
        centroids = torch.where(sums.any(dim=1, keepdim=True), F.normalize(sums, dim=1), centroids)
    return centroids


def global_centroids(local: Tensor, *, old: Tensor) -> Tensor:
    """Cluster the clients' local centroids into global ones of nearly equal size: unit vectors ``(clusters, dim)``.

    ``local`` are those of all clients, ``(n, dim)``, on the CPU; rows of zeros are ignored. ``old`` defines shape and
    dtype, and is returned unchanged if ``local`` has no centroids. With fewer local centroids than clusters some of the
    new ones are equal.
    """
    points = local[local.any(dim=1)]
    return equal_clusters(points, clusters=len(old)).to(old.dtype) if len(points) else old


def consistency(z: Tensor, target: Tensor, centroids: Tensor, *, temperature: float) -> Tensor:
    """Return the cross entropy of one view's cluster assignments with the target's assignments of the other view.

    With p(z) the softmax over the centroids c of ``cos(z, c) / temperature``, the loss is the mean over images of
    ``-sum_c p(target)_c log p(z)_c``, a scalar >= 0; log(clusters) for centroids of zeros.

    ``z`` and ``target`` are projections of the online and of the target network, ``(batch, dim)``; normalized here. The
    gradient flows into ``z`` only. ``centroids`` are unit vectors, or all zeros, ``(clusters, dim)``.
    """
    with torch.autocast(z.device.type, enabled=False):
        logits, target_logits = (
            F.normalize(x.to(centroids.dtype), dim=1) @ centroids.T / temperature for x in (z, target)
        )
    return F.cross_entropy(logits, target_logits.detach().softmax(dim=1))


def rotate_quarters(images: Tensor) -> Tensor:
    """Rotate image i of ``(batch, channels, size, size)`` counter-clockwise by i modulo 4 quarter turns."""
    turned = images.clone()
    for quarters in (1, 2, 3):
        turned[quarters::4] = images[quarters::4].rot90(quarters, (2, 3))
    return turned


class Orchestra(EMATargetMethod):
    r"""Orchestra's client: online and target networks, a rotation classifier, a memory and the centroids.

    Besides the networks its parts are ``rotation``, ``memory`` ``(queue_size, dim)`` (newest first; rows of zeros are
    empty), ``local_centroids`` ``(local_clusters, dim)`` and ``centroids`` ``(global_clusters, dim)``.

    $$
    a_g(z) = \frac{\exp(\cos(c_g, z) / \tau)}{\sum_{f=1}^{G} \exp(\cos(c_f, z) / \tau)} \qquad
    \mathcal{L} = -\frac{1}{n} \sum_i \sum_{g=1}^{G} a_g(\bar{z}_i^{(1)}) \log a_g(z_i^{(2)})
    - \frac{1}{n} \sum_i \log \operatorname{softmax}(V \tilde{z}_i + b)_{i \bmod 4}
    $$

    with $c_g$ the G global centroids, $z_i^{(2)}$ the projection of view 2 of image i, $\bar{z}_i^{(1)}$ the target's
    of view 1, without gradient, $\tilde{z}_i$ the projection of view 1 turned by i mod 4 quarters, and V, b the
    rotation classifier.
    """

    uploaded_parts = (LOCAL_CENTROIDS,)
    broadcast_parts = (CENTROIDS,)

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        local_clusters: int,
        global_clusters: int,
        queue_size: int,
        temperature: float,
        ema_decay: float,
        target_init: str = "persist",
    ) -> None:
        if queue_size < local_clusters:
            raise InputError(
                f"method.queue_size={queue_size} must be at least method.local_clusters={local_clusters}; "
                "the authors use 128"
            )
        super().__init__(encoder, projector=projector, ema_decay=ema_decay, target_init=target_init)
        dim = self.projector.out_features
        self.rotation = nn.Linear(dim, 4)
        self.temperature = temperature
        self.memory: Tensor
        self.local_centroids: Tensor
        self.centroids: Tensor
        self.register_buffer("memory", torch.zeros(queue_size, dim))
        self.keep_local("memory")
        self.register_buffer(LOCAL_CENTROIDS, torch.zeros(local_clusters, dim))
        self.register_buffer(CENTROIDS, torch.zeros(global_clusters, dim))

    def inputs(self, views: Views) -> Views:
        """Return the rotated first view (see `rotate_quarters`), the second one, and the first one as it is.

        Regularizers use the first two.
        """
        return Views((View(rotate_quarters(views[0].images)), views[1], views[0]))

    def loss(self, views: Views) -> Tensor:
        turned, view2, view1 = views.images
        quarters = torch.arange(len(turned), device=turned.device) % 4
        rotation = F.cross_entropy(self.rotation(self.projector(self.encoder(turned))).float(), quarters)
        z2 = self.projector(self.encoder(view2))
        with torch.no_grad():
            target1 = self.target_projector(self.target_encoder(view1))
        self.enqueue(target1)
        return consistency(z2, target1, self.centroids, temperature=self.temperature) + rotation

    @torch.no_grad()
    def enqueue(self, projections: Tensor) -> None:
        """Insert normalized projections ``(batch, dim)`` at the front of the memory and drop the oldest."""
        newest = F.normalize(projections.to(self.memory.dtype), dim=1)
        self.memory.copy_(torch.cat((newest, self.memory))[: len(self.memory)])

    def parts_to_upload(self, layers: Layers) -> Layers:
        memory = torch.from_numpy(layers["memory"])
        projections = memory[memory.any(dim=1)]
        if not len(projections):  # there was no local epoch
            return super().parts_to_upload(layers)
        centroids = equal_clusters(projections, clusters=len(self.local_centroids)).to(memory.dtype)
        return {LOCAL_CENTROIDS: centroids.numpy()}

    def aggregate_parts(self, uploaded: Sequence[Layers], broadcast: Layers) -> Layers:
        local = torch.from_numpy(np.concatenate([layers[LOCAL_CENTROIDS] for layers in uploaded]))
        return {CENTROIDS: global_centroids(local, old=torch.from_numpy(broadcast[CENTROIDS])).numpy()}
