"""A trained encoder as the backbone of torchvision's detectors: Faster R-CNN, and Mask R-CNN for outlines as well.

    encoder = load_encoder("encoder.pt")
    detector = faster_rcnn(encoder, num_classes=4)  # with the background, as torchvision counts
    losses = detector(images, targets)  # images in [0, 1]; see torchvision.models.detection

The stages of the encoder give the levels of a feature pyramid (Lin et al., CVPR 2017, arXiv 1612.03144). Everything
else is torchvision's, which is imported with this module only.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from fedssl.encoders.base import Encoder
from fedssl.errors import InputError
from fedssl.export import Preprocess

_RATIOS = (0.5, 1.0, 2.0)  # height to width of anchors, as in torchvision


class Pyramid(nn.Module):
    """Feature maps of an encoder's stages, all of one width.

    Parameters
    ----------
    encoder : Encoder
        Whose stages make maps ``(batch, channels, height, width)``; it is used as it is, not copied.
    size : int
        Height and width in pixels of an image, to find what each stage makes of it.
    out_channels : int
        Channels of every map.

    Attributes
    ----------
    names : list of str
        Of the stages' maps; one more, "pool", is the last of them at half the size.
    strides : list of int
        Pixels of an image for one position, of each map.

    Raises
    ------
    InputError
        The stages make tokens (a vision transformer) and not maps.
    """

    def __init__(self, encoder: Encoder, *, size: int, out_channels: int = 256) -> None:
        super().__init__()
        self.encoder, self.out_channels = encoder, out_channels
        if encoder.patch_embedding is not None:
            raise InputError(
                f"the stages of {type(encoder).__name__} make tokens, of which there is no feature pyramid; give an "
                "encoder of convolutions, such as encoder=resnet18"
            )
        maps = self._look(size)
        self.names = list(maps)
        self.strides = [size // each.shape[-1] for each in maps.values()]
        self.strides.append(2 * self.strides[-1])
        channels = [each.shape[1] for each in maps.values()]
        self.fpn = FeaturePyramidNetwork(channels, out_channels, extra_blocks=LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Maps ``(batch, out_channels, height, width)`` of standardized images, by name."""
        found: dict[str, Tensor] = self.fpn(self._maps(images))
        return found

    def _maps(self, images: Tensor) -> "OrderedDict[str, Tensor]":
        x, maps = self.encoder.stem(images), OrderedDict()
        for name, stage in zip(self.encoder.stage_names, self.encoder.stages(), strict=True):
            x = stage(x)
            maps[name.replace(".", "_")] = x
        return maps

    def _look(self, size: int) -> "OrderedDict[str, Tensor]":
        """What the stages make of an image, without a trace in the running statistics of batch normalization."""
        training = self.encoder.training
        self.encoder.eval()
        weight = next(self.encoder.parameters())
        with torch.no_grad():
            maps = self._maps(weight.new_zeros(1, weight.shape[1], size, size))
        self.encoder.train(training)
        return maps


def faster_rcnn(encoder: Encoder, *, num_classes: int, out_channels: int = 256, regions: int = 512) -> FasterRCNN:
    """Faster R-CNN (arXiv 1506.01497) on a trained encoder.

    Parameters
    ----------
    encoder : Encoder
        As `fedssl.export.load_encoder` gives it, whose images it takes; it is trained further.
    num_classes : int
        Of objects, and one for the background.
    out_channels : int
        Of the feature pyramid.
    regions : int
        Of an image, on how many the second stage is trained. Small images have few that differ.

    Returns
    -------
    FasterRCNN
        Images are scaled to the size that the encoder was trained on (``transform.min_size``) and standardized by
        its means. Anchors of a level are squares of four positions' length, and two oblongs of the same area.

    Raises
    ------
    InputError
        The encoder makes no maps, or came from no file.
    """
    return FasterRCNN(**_parts(encoder, num_classes, out_channels, regions))


def mask_rcnn(encoder: Encoder, *, num_classes: int, out_channels: int = 256, regions: int = 512) -> MaskRCNN:
    """Mask R-CNN (arXiv 1703.06870) on a trained encoder; everything else is as in `faster_rcnn`."""
    parts = _parts(encoder, num_classes, out_channels, regions)
    pool = MultiScaleRoIAlign(parts["backbone"].names, output_size=14, sampling_ratio=2)
    return MaskRCNN(**parts, mask_roi_pool=pool)


def _parts(encoder: Encoder, num_classes: int, out_channels: int, regions: int) -> dict[str, Any]:
    preprocess: Preprocess | None = vars(encoder).get("preprocess")  # load_encoder gives it
    if preprocess is None:
        raise InputError("the encoder does not say what its images went through; load it by load_encoder(FILE)")
    size = preprocess.size
    backbone = Pyramid(encoder, size=size, out_channels=out_channels)
    sizes = tuple((4 * stride,) for stride in backbone.strides)
    return {
        "backbone": backbone,
        "num_classes": num_classes,
        "rpn_anchor_generator": AnchorGenerator(sizes, (_RATIOS,) * len(sizes)),
        "box_roi_pool": MultiScaleRoIAlign(backbone.names, output_size=7, sampling_ratio=2),
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
        "min_size": size,
        "max_size": 2 * size,
        "box_batch_size_per_image": regions,
        "rpn_post_nms_top_n_train": 2 * regions,
        "rpn_post_nms_top_n_test": 2 * regions,
    }
