"""iBOT (Zhou et al., arXiv 2111.07832): DINO, and the student predicts the teacher's tokens of hidden patches.

The student sees the global views with a mask token in place of hidden patches, the teacher sees all patches. DINO's
loss applies to the class tokens of global and local views, the loss of masked patches to the patch tokens of the global
views.

Differences from the authors' code, besides those of `fedssl.methods.dino`:

- The heads of student and teacher run on the hidden patches only, so that the center of patch tokens, and statistics of
  batch normalization, are those of hidden patches. The authors' run on all patches, which takes longer; the other
  patches have no part in the loss.
- Class and patch tokens have the same head, temperatures and momentum of the centers (the authors' defaults).
- The patch loss counts in every epoch and is a mean over images with and without hidden patches, as in the authors'
  code; there the share of hidden patches varies between images as here.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.encoders import Encoder
from fedssl.encoders.tokens import TokenEncoder
from fedssl.errors import InputError
from fedssl.losses import at_least_float32, dino, masked_tokens
from fedssl.methods.base import FailureMode
from fedssl.methods.dino import DINO, Center, assignment_entropies
from fedssl.methods.heads import MLP
from fedssl.views import AcceptedViews, Views, by_size

PATCHES_UNIFORM = FailureMode(
    diagnostic="patch_assignment_entropy",
    maximum=0.98,
    message="the teacher assigns every patch to all prototypes equally; lower method.teacher_temperature and "
    "method.warmup_teacher_temperature",
)
ONE_PATCH_PROTOTYPE = FailureMode(
    diagnostic="patch_prototype_entropy",
    minimum=0.05,
    message="the teacher assigns all patches to one prototype; lower method.center_momentum, or raise "
    "method.teacher_temperature",
)


class IBOT(DINO):
    r"""iBOT: DINO's networks on a vision transformer with a class token, a mask token, and a center of patch tokens.

    The parts ``mask_token`` and ``patch_center`` are exchanged like ``projector`` and ``center``.

    The projector's first outputs are those of the class tokens of the global views; regularizers use them. Patches of
    these views are hidden. If the projector has batch normalization, class tokens and patch tokens have their own
    statistics in a step. A few hidden patches are repeated (`fedssl.augmentation.patch_masks.padded_numbers`): they
    count once in the loss, and each time in c' and in these statistics.

    $$
    \mathcal{L} = \mathcal{L}_{\text{DINO}} - \frac{\lambda}{nG} \sum_{i=1}^{n} \sum_{u=1}^{G} \frac{1}{|M_i^{(u)}|}
    \sum_{j \in M_i^{(u)}} \sum_{k=1}^{K} P_t(u, i, j)_k \log P_s(u, i, j)_k
    $$

    $$
    P_s(u, i, j) = \operatorname{softmax}(\hat{s}_{ij}^{(u)} / \tau_s) \qquad
    P_t(u, i, j) = \operatorname{softmax}((t_{ij}^{(u)} - c') / \tau_t)
    $$

    $$
    c' \leftarrow \mu \, c' + (1 - \mu) \frac{1}{\sum_{i,u} |M_i^{(u)}|} \sum_{i=1}^{n} \sum_{u=1}^{G}
    \sum_{j \in M_i^{(u)}} t_{ij}^{(u)}
    $$

    with $M_i^{(u)}$ the hidden patches of global view u of image i, $\hat{s}_{ij}$ the student's logits of patch j of
    the masked view, $t_{ij}$ the teacher's of the complete view, $c'$ the center of patch tokens, and $\lambda$ the
    ``patch_weight``. A view without hidden patches counts as 0.
    """

    encoder: TokenEncoder
    target_encoder: TokenEncoder
    accepted_views = AcceptedViews(max_global=None, local=True, masks=("block", "random"), augmentation="ibot")
    equal_global_sizes = True
    masks_patches = True
    regularized_parts = ("projector",)
    failure_modes = (*DINO.failure_modes, PATCHES_UNIFORM, ONE_PATCH_PROTOTYPE)

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        num_prototypes: int,
        student_temperature: float,
        teacher_temperature: float,
        warmup_teacher_temperature: float,
        warmup_rounds: int,
        center_momentum: float,
        freeze_last_layer_rounds: int,
        ema_decay: float,
        ema_schedule: str = "constant",
        target_init: str = "persist",
        patch_weight: float = 1.0,
    ) -> None:
        if not isinstance(encoder, TokenEncoder) or "class_token" not in dict(encoder.named_parameters()):
            raise InputError(
                "IBOT needs an encoder with tokens of patches and a class token; set encoder=vit_tiny "
                f"encoder.pool=token augmentation={self.accepted_views.augmentation}"
            )
        super().__init__(
            encoder,
            projector=projector,
            num_prototypes=num_prototypes,
            student_temperature=student_temperature,
            teacher_temperature=teacher_temperature,
            warmup_teacher_temperature=warmup_teacher_temperature,
            warmup_rounds=warmup_rounds,
            center_momentum=center_momentum,
            freeze_last_layer_rounds=freeze_last_layer_rounds,
            ema_decay=ema_decay,
            ema_schedule=ema_schedule,
            target_init=target_init,
        )
        self.patch_weight = patch_weight
        self.mask_token = nn.Parameter(torch.zeros(encoder.feature_dim))
        self.patch_center = Center(num_prototypes, momentum=center_momentum)

    def loss(self, views: Views) -> Tensor:
        images, (hidden, numbers, weights) = torch.cat(views.global_images), hidden_patches(views)
        tokens = self.encoder.forward_tokens(self.encoder.embed(images, hidden=hidden, mask_token=self.mask_token))
        h = self.encoder.pool_tokens(tokens)
        if views.local_images:
            h = torch.cat((h, *(self.encoder(local) for local in by_size(views.local_images))))
        student = self.prototypes(self.projector(h)).chunk(len(views))
        student_patches = self.prototypes(self.projector(_patch_tokens(self.encoder, tokens)[numbers]))
        teacher, teacher_patches = self.teacher_token_logits(views, numbers)
        loss = dino(student, teacher, center=self.center.running_mean, **self.temperatures)
        patch_loss = masked_tokens(
            student_patches, teacher_patches, weights, center=self.patch_center.running_mean, **self.temperatures
        )
        self.center.update(torch.cat(teacher))
        self.patch_center.update(teacher_patches)
        return loss + self.patch_weight * patch_loss

    def teacher_logits(self, views: Views) -> tuple[Tensor, ...]:
        return self.teacher_token_logits(views, hidden_patches(views)[1])[0]

    @torch.no_grad()
    def teacher_token_logits(self, views: Views, numbers: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the teacher's logits of each global view, ``(batch, K)``, and those of patches, ``(n, K)``.

        ``numbers`` are those of the patches, ``(n,)``, see `hidden_patches`.
        """
        encoder, projector = self.target_encoder, self.target_projector
        tokens = encoder.forward_tokens(encoder.embed(torch.cat(views.global_images)))
        logits = self.target_prototypes(projector(encoder.pool_tokens(tokens)))
        patches = self.target_prototypes(projector(_patch_tokens(encoder, tokens)[numbers]))
        return logits.chunk(len(views.global_images)), patches

    def diagnose(self, views: Views) -> dict[str, float]:
        """Return `assignment_entropies` of the teacher's class tokens and of its patch tokens."""
        every = torch.arange(hidden_patches(views)[0].numel(), device=views[0].images.device)
        centered = at_least_float32(self.teacher_token_logits(views, every)[1]) - self.patch_center.running_mean
        single, mean = assignment_entropies(F.softmax(centered / self.teacher_temperature, dim=1))
        own = {"patch_assignment_entropy": single.item(), "patch_prototype_entropy": mean.item()}
        return super().diagnose(views) | own


def hidden_patches(views: Views) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden patches of the global views as a mask, by their numbers, and with their weights in the loss.

    The mask is bool, ``(views * batch, patches)``. Numbers ``(n,)`` count the patches of all images. A weight ``(n,)``
    is 1 / (images * hidden patches of the image), and 0 for a repeated patch or one that is not hidden.
    """
    masks = [view.mask for view in views if view.mask is not None]
    hidden = torch.cat([mask.hidden for mask in masks])
    numbers, counted = [], []
    for view, mask in enumerate(masks):
        assert mask.hidden_numbers is not None  # see `AcceptedViews`
        numbers.append(mask.hidden_numbers + view * mask.hidden.numel())
        counted.append(torch.arange(len(mask.hidden_numbers), device=hidden.device) < mask.hidden.sum())
    joined = torch.cat(numbers)
    hidden_of_image = hidden.sum(dim=1)[joined // hidden.shape[1]]
    return hidden, joined, torch.cat(counted) / (len(hidden) * hidden_of_image.clamp(min=1))


def _patch_tokens(encoder: TokenEncoder, tokens: Tensor) -> Tensor:
    """Return the tokens of patches without those before them, ``(images * patches, feature_dim)``."""
    return tokens[:, encoder.num_prefix_tokens :].flatten(end_dim=1)
