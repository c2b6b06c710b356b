"""Plain training loops with lightly's transforms, heads and losses, as in lightly's examples; peers of `objectives.py`.

Each function builds the step of one method for an encoder and the sizes of fedssl's heads: it maps the batch of a
DataLoader to the loss, and a second function runs after the optimizer's step.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lightly.data.ijepa_collate import IJEPAMaskCollator
from lightly.loss import DINOLoss, IBOTPatchLoss, LeJEPALoss, SwaVLoss, VICRegLoss
from lightly.models import utils
from lightly.models.modules import heads
from lightly.models.modules.ijepa_timm import IJEPAPredictorTIMM
from lightly.models.modules.masked_autoencoder_timm import MAEDecoderTIMM
from lightly.models.modules.masked_vision_transformer_timm import MaskedVisionTransformerTIMM
from lightly.transforms import DINOTransform, MAETransform, SwaVTransform, VICRegTransform
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

SIZE, LOCAL = 32, 16  # pixels of global and local views


class Loop(NamedTuple):
    """One method: transform of a PIL image, trained modules, loss of a batch of views, and the end of a step."""

    transform: Callable[..., Sequence[Tensor]]
    modules: nn.Module
    loss: Callable[[Any], Tensor]  # of a batch of the DataLoader: the views
    on_step_end: Callable[[], None] = lambda: None
    collate: Callable[[list[Any]], Any] | None = None  # None: the DataLoader's


def vicreg(encoder: nn.Module, dim: int, *, hidden: int, out: int, layers: int) -> Loop:
    model = nn.Sequential(encoder, heads.VICRegProjectionHead(dim, hidden, out, num_layers=layers))
    criterion = VICRegLoss()
    return Loop(VICRegTransform(SIZE), model, lambda views: criterion(model(views[0]), model(views[1])))


def lejepa(encoder: nn.Module, dim: int, *, hidden: int, out: int, layers: int, slices: int) -> Loop:
    model = nn.Sequential(encoder, heads.LeJEPAProjectionHead(dim, hidden, out, num_layers=layers))
    criterion = LeJEPALoss(sigreg_num_vectors=slices)

    def loss(views: Sequence[Tensor]) -> Tensor:
        large, small = (torch.stack([model(view) for view in part]) for part in (views[:2], views[2:]))
        found: Tensor = criterion(local_proj=small, global_proj=large)
        return found

    return Loop(DINOTransform(SIZE, local_crop_size=LOCAL), model, loss)


def swav(encoder: nn.Module, dim: int, *, hidden: int, out: int, prototypes: int) -> Loop:
    model = nn.Sequential(encoder, heads.SwaVProjectionHead(dim, hidden, out))
    assign, criterion = heads.SwaVPrototypes(out, prototypes), SwaVLoss()
    transform = SwaVTransform((SIZE, LOCAL), (2, 6))

    def loss(views: Sequence[Tensor]) -> Tensor:
        assign.normalize()
        scores = [assign(F.normalize(model(view), dim=1)) for view in views]
        found: Tensor = criterion(scores[:2], scores[2:])
        return found

    return Loop(transform, nn.ModuleList([model, assign]), loss)


def dino(encoder: nn.Module, dim: int, *, hidden: int, bottleneck: int, prototypes: int) -> Loop:
    student, teacher = (
        nn.Sequential(network, _dino_head(dim, hidden, bottleneck, prototypes))
        for network in (encoder, copy.deepcopy(encoder))
    )
    teacher.requires_grad_(False)
    criterion = DINOLoss(prototypes)

    def loss(views: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            targets = [teacher(view) for view in views[:2]]
        found: Tensor = criterion(targets, [student(view) for view in views], epoch=0)
        return found

    transform = DINOTransform(SIZE, local_crop_size=LOCAL)
    return Loop(transform, student, loss, lambda: utils.update_momentum(student, teacher, m=0.99))


def mae(*, patch: int, width: int, depth: int, heads: int, sizes: dict[str, int]) -> Loop:
    encoder = _vit(patch=patch, width=width, depth=depth, heads=heads)
    tokens = encoder.sequence_length
    decoder = MAEDecoderTIMM(
        num_patches=(SIZE // patch) ** 2,
        patch_size=patch,
        embed_dim=width,
        decoder_embed_dim=sizes["width"],
        decoder_depth=sizes["depth"],
        decoder_num_heads=sizes["heads"],
    )

    def loss(views: Sequence[Tensor]) -> Tensor:
        images = views[0]
        kept, masked = utils.random_token_mask((len(images), tokens), mask_ratio=0.75, device=images.device)
        x = decoder.embed(encoder.encode(images, idx_keep=kept))
        full = utils.repeat_token(decoder.mask_token, (len(images), tokens))
        decoded = decoder.decode(utils.set_at_index(full, kept, x.type_as(full)))
        prediction = decoder.predict(utils.get_at_index(decoded, masked))
        target = utils.get_at_index(utils.patchify(images, patch), masked - 1)
        mean, variance = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
        return F.mse_loss(prediction, (target - mean) / (variance + 1e-6) ** 0.5)

    return Loop(MAETransform(SIZE), nn.ModuleList([encoder, decoder]), loss)


def ijepa(*, patch: int, width: int, depth: int, heads: int, sizes: dict[str, int]) -> Loop:
    encoder = _vit(patch=patch, width=width, depth=depth, heads=heads, class_token=False)
    target = copy.deepcopy(encoder).requires_grad_(False)
    predictor = IJEPAPredictorTIMM(
        num_patches=(SIZE // patch) ** 2,
        depth=sizes["depth"],
        mlp_dim=width,
        predictor_embed_dim=sizes["width"],
        num_heads=sizes["heads"],
    )
    collate = IJEPAMaskCollator(
        SIZE, patch, enc_mask_scale=(0.85, 1.0), pred_mask_scale=(0.15, 0.2), aspect_ratio=(0.75, 1.5), npred=4
    )

    def loss(batch: Any) -> Tensor:
        (images, *_), context, targets = batch
        with torch.no_grad():
            h = F.layer_norm(target.encode(images), (width,))
            wanted = utils.repeat_interleave_batch(utils.apply_masks(h, targets), len(images), repeat=len(context))
        predicted = predictor(encoder.encode(images, idx_keep=context[0]), context, targets)
        return F.smooth_l1_loss(predicted, wanted)

    modules, update = nn.ModuleList([encoder, predictor]), lambda: utils.update_momentum(encoder, target, m=0.996)
    return Loop(MAETransform(SIZE), modules, loss, update, collate)


def ibot(*, patch: int, width: int, depth: int, heads: int, hidden: int, bottleneck: int, prototypes: int) -> Loop:
    student = _vit(patch=patch, width=width, depth=depth, heads=heads, dynamic=True)
    head, target_head = (_dino_head(width, hidden, bottleneck, prototypes) for _ in range(2))
    both = nn.ModuleList([student, head])
    teacher = nn.ModuleList([copy.deepcopy(student), target_head]).requires_grad_(False)
    class_loss, patch_loss, grid = DINOLoss(prototypes), IBOTPatchLoss(prototypes), SIZE // patch

    def loss(views: Sequence[Tensor]) -> Tensor:
        large, small = torch.cat(list(views[:2])), torch.cat(list(views[2:]))
        masks = utils.random_block_mask((len(large), grid, grid), device=large.device)
        with torch.no_grad():
            features = teacher[0].encode(large)
            targets, patches = teacher[1](features[:, 0]), teacher[1](features[:, 1:][masks.flatten(1)])
        flat = torch.cat((torch.zeros(len(large), 1, dtype=torch.bool), masks.flatten(1)), dim=1)
        masked = student.encode(large, mask=flat)
        logits = [head(masked[:, 0]), head(student.encode(small)[:, 0])]
        students = [part for out in logits for part in out.split(len(views[0]))]
        found: Tensor = class_loss(list(targets.chunk(2)), students, epoch=0)
        return found + patch_loss(patches, head(masked[:, 1:][masks.flatten(1)]), masks)

    transform = DINOTransform(SIZE, local_crop_size=LOCAL)
    return Loop(transform, both, loss, lambda: utils.update_momentum(both, teacher, m=0.99))


def _dino_head(width: int, hidden: int, bottleneck: int, prototypes: int) -> nn.Module:
    return heads.DINOProjectionHead(width, hidden, bottleneck, prototypes)


def _vit(
    *, patch: int, width: int, depth: int, heads: int, dynamic: bool = False, class_token: bool = True
) -> MaskedVisionTransformerTIMM:
    vit = VisionTransformer(
        SIZE,
        patch,
        num_classes=0,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        dynamic_img_size=dynamic,
        class_token=class_token,
        global_pool="token" if class_token else "avg",
    )
    return MaskedVisionTransformerTIMM(vit)
