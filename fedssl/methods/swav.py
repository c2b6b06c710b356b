"""SwAV (Caron et al., NeurIPS 2020, arXiv 2006.09882): a view predicts the cluster assignment of another view.

Clusters are prototypes, unit vectors in the space of projections. The codes of a global view are soft assignments of
its images to prototypes of equal size, by Sinkhorn-Knopp on the batch and, optionally, a queue of older projections
(`fedssl.losses.sinkhorn`). Every other view predicts these codes (`fedssl.losses.swav`). Equal sizes prevent collapse.

In a federation the prototypes are exchanged and aggregated like all networks, and normalized again by the client. The
k-th prototypes of two clients are near each other because both start from the same ones. In long local training they
may exchange their roles; ``match_prototypes`` permutes them back before the upload.

Differences from the authors' code:

- Prototypes are frozen, and the queue is unused, for a number of rounds instead of steps and epochs.
- The queue is filled from the first round on; the authors create it when its use starts.
- The authors round the length of the queue down to a multiple of the batch size. Here batches may have any size.
- Sinkhorn-Knopp normalizes in log space, and codes and scores are computed in float32.
- Batch normalization and Sinkhorn-Knopp use the batch of one client; the authors synchronize both over all GPUs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedssl.encoders import Encoder
from fedssl.losses import at_least_float32, sinkhorn, swav
from fedssl.losses.precision import product
from fedssl.methods.base import FailureMode
from fedssl.methods.heads import MLP, ProjectorMethod
from fedssl.views import AcceptedViews, Views, by_size

QUEUE = "queue"


def best_order(prototypes: Tensor, reference: Tensor) -> Tensor:
    """Return the order of ``prototypes`` in which the sum of products with the same row of ``reference`` is largest.

    Both are unit vectors ``(k, dim)``, so that the products are cosines. The order is int64 ``(k,)``, on the CPU; it is
    an optimal assignment (Hungarian algorithm).
    """
    cosines = reference.double().cpu() @ prototypes.double().cpu().T
    return torch.from_numpy(linear_sum_assignment(cosines.numpy(), maximize=True)[1])


def distinct_assignments(p: Tensor) -> float:
    """Return exp of the mutual information of images and prototypes, for predictions p ``(n, num_prototypes)``.

    It is 1 if all images have the same prediction, such as one prototype or all prototypes equally, and k if the images
    are equally distributed over k prototypes, each image on one.
    """
    mean = p.mean(dim=0)
    information = torch.special.xlogy(p, p).sum(dim=1).mean() - torch.special.xlogy(mean, mean).sum()
    return float(information.exp())


def used_share(nearest: Tensor, *, num_prototypes: int) -> float:
    """Return the share of prototypes that are the nearest one of an image, for their indices ``(n,)``.

    The share is that of the ``min(n, num_prototypes)`` prototypes that could be the nearest ones.
    """
    return len(nearest.unique()) / min(len(nearest), num_prototypes)


class SwAV(ProjectorMethod):
    r"""SwAV: encoder, projector, prototypes and a queue.

    Views of one size are concatenated into one forward pass of the encoder. The representations of all views are one
    forward pass of the projector, as in the authors' code: its batch normalization uses the statistics of global and
    local views together, so that their projections are comparable.

    The parts ``encoder``, ``projector`` and ``prototypes`` (a linear layer without bias, ``(num_prototypes, dim)``) are
    exchanged and aggregated. ``queue`` ``(2, queue_size, dim)`` has projections of the two global views, newest first;
    it stays with the client and is kept between its rounds. It is empty in a client's first round, and whenever the
    encoder grows by stages. Rows of zeros are empty. The queue is used only when it is full.

    $$
    s_{ik}^{(v)} = \cos(z_i^{(v)}, c_k) \qquad
    p_{ik}^{(v)} = \frac{\exp(s_{ik}^{(v)} / \tau)}{\sum_l \exp(s_{il}^{(v)} / \tau)} \qquad
    q_{ik}^{(v)} = a_i b_k \exp(s_{ik}^{(v)} / \varepsilon) \quad
    \sum_k q_{ik}^{(v)} = 1 \quad \sum_i q_{ik}^{(v)} \approx \frac{n}{K}
    $$

    $$
    \mathcal{L} = -\frac{1}{2 (V - 1) n} \sum_{v=1}^{2} \sum_{u \ne v} \sum_{i=1}^{n} \sum_{k=1}^{K}
    q_{ik}^{(v)} \log p_{ik}^{(u)}
    $$

    with $z_i^{(v)}$ the projection of view v of image i (the first two of the V views are global), $c_k$ the K
    prototypes, $\tau$ the temperature, and $\varepsilon$, ``epsilon``, the regularization of Sinkhorn-Knopp (Eqs. 2, 5
    and 6).
    """

    names_changed_at_start = ("prototypes.weight",)
    accepted_views = AcceptedViews(min_global=2, max_global=2, local=True, augmentation="multi_crop")
    failure_modes = (
        FailureMode(
            diagnostic="distinct_prototypes",
            minimum=1.02,
            message="all images have nearly the same assignment to prototypes; lower method.epsilon, or raise "
            "method.queue_start_round if there is a queue",
        ),
        FailureMode(
            diagnostic="used_prototypes",
            minimum=0.1,
            message="few prototypes are the nearest one of any image; lower method.num_prototypes, or raise "
            "method.queue_size or batch_size so that there are several images per prototype",
        ),
    )

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        num_prototypes: int,
        temperature: float,
        epsilon: float,
        iterations: int,
        freeze_prototypes_rounds: int,
        queue_size: int,
        queue_start_round: int,
        match_prototypes: bool,
    ) -> None:
        super().__init__(encoder, projector=projector)
        dim = self.projector.out_features
        self.prototypes = nn.Linear(dim, num_prototypes, bias=False)
        self.temperature, self.epsilon, self.iterations = temperature, epsilon, iterations
        self.freeze_prototypes_rounds = freeze_prototypes_rounds
        self.queue_size, self.queue_start_round = queue_size, queue_start_round
        self.match_prototypes = match_prototypes
        self.reordering = "method.match_prototypes" if match_prototypes else ""
        self.queue: Tensor
        if queue_size:
            self.register_buffer(QUEUE, torch.zeros(2, queue_size, dim))
            self.keep_local(QUEUE)
        self.downloaded: Tensor  # prototypes at the start of the round
        self.register_buffer("downloaded", torch.zeros(num_prototypes, dim), persistent=False)
        self.start_round(first=True)

    @property
    def is_frozen(self) -> bool:
        """Return whether prototypes are frozen in the current round."""
        return self.round <= self.freeze_prototypes_rounds

    @property
    def uses_queue(self) -> bool:
        """Return whether codes use the queue, once it is full, in the current round."""
        return self.queue_size > 0 and self.round >= self.queue_start_round

    @property
    def late_starts(self) -> dict[str, int]:
        queue = {"method.queue_start_round": self.queue_start_round} if self.queue_size else {}
        return {"method.freeze_prototypes_rounds": self.freeze_prototypes_rounds + 1, **queue}

    @property
    def step_constants(self) -> tuple[float, ...]:
        return (float(self.is_frozen), float(self.uses_queue))

    @torch.no_grad()
    def start_round(self, *, first: bool) -> None:
        super().start_round(first=first)
        weight = self.prototypes.weight
        weight.copy_(F.normalize(weight, dim=1))
        self.downloaded.copy_(weight)

    @torch.no_grad()
    def on_step_end(self) -> None:
        weight = self.prototypes.weight
        # An optimizer may change weights without gradient, by weight decay.
        weight.copy_(self.downloaded if self.is_frozen else F.normalize(weight, dim=1))

    @torch.no_grad()
    def end_round(self) -> None:
        if self.match_prototypes:
            weight = self.prototypes.weight
            weight.copy_(weight[best_order(weight, self.downloaded).to(weight.device)])

    def loss(self, views: Views) -> Tensor:
        z, weight = self.project_all(views), self.prototypes.weight
        if self.is_frozen:
            weight = weight.detach() + 0 * weight  # a gradient of 0: fused optimizers need one for all weights
        scores = product(z, weight.T)
        codes = self.assign(z[:2].detach(), scores[:2].detach())
        return swav(scores.unbind(), codes.unbind(), temperature=self.temperature)

    def project_all(self, views: Views) -> Tensor:
        """Return normalized projections of all views, ``(views, batch, dim)``, in at least float32."""
        h = torch.cat([self.encoder(images) for images in by_size(views.images)])
        z = F.normalize(at_least_float32(self.projector(h)), dim=1)
        return z.view(len(views), views.num_images, -1)

    @torch.no_grad()
    def assign(self, z: Tensor, scores: Tensor) -> Tensor:
        """Return the codes of the global views, and insert their projections into the queue.

        ``z`` are normalized projections ``(2, batch, dim)``; ``scores`` are their products with the prototypes, with
        the shape of the result, ``(2, batch, num_prototypes)``.
        """
        codes = sinkhorn(scores, epsilon=self.epsilon, iterations=self.iterations)
        if self.uses_queue:
            older = product(self.queue, self.prototypes.weight.T)
            both = sinkhorn(torch.cat((scores, older), dim=1), epsilon=self.epsilon, iterations=self.iterations)
            is_full = self.queue[:, -1].any()  # a choice on the device, without waiting for it
            codes = torch.where(is_full, both[:, : z.shape[1]], codes)
        if self.queue_size:
            self.queue.copy_(torch.cat((z, self.queue), dim=1)[:, : self.queue_size])
        return codes

    def diagnose(self, views: Views) -> dict[str, float]:
        """Return `distinct_assignments` of the global views, and `used_share` of their nearest prototypes."""
        scores = product(self.project_all(views)[:2], self.prototypes.weight.T).flatten(0, 1)
        return {
            "distinct_prototypes": distinct_assignments((scores / self.temperature).softmax(dim=1)),
            "used_prototypes": used_share(scores.argmax(dim=1), num_prototypes=scores.shape[1]),
        }
