"""Functions that build the encoders.

One function per encoder, named as in ``conf/encoder/``, which describes the settings; ``channels`` and ``size`` are the
channels of the images, and their height and width in pixels. ResNets and vision transformers are torchvision's networks
without the classifier. Their ``state_dict`` has torchvision's names, so weights can be exchanged with torchvision.
ResNets, with torchvision's random numbers, are written here because torchvision imports torch's compiler: two seconds,
and 90 MB of each process. By default they have a stem for small images: one 3x3 convolution of stride 1 and no pooling,
as SimCLR uses on CIFAR-10 (arXiv 2002.05709, appendix B.9) and the federated papers after it. Nothing is downloaded.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedssl.config.constraints import check_arguments
from fedssl.encoders.base import Encoder
from fedssl.encoders.library import require_timm
from fedssl.errors import InputError

_WIDTHS = (64, 128, 256, 512)  # of the stages of a ResNet, before the expansion
_EXPANSION = 4  # of a bottleneck
_NUM_CLASSES = 1000  # of torchvision's classifier, whose weights are drawn too
_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}  # of each stage of a ResNet, by depth

Normalize = Callable[[int], nn.Module]  # builds the normalization of a number of channels


class ConvSmall(Encoder):
    """Blocks of 3x3 convolution, normalization and ReLU, followed by global average pooling.

    Each block is a stage. ``widths`` are the channels before the first block and after each block, ``strides`` one
    number per block, ``norm`` as in `normalization`.
    """

    def __init__(self, *, widths: tuple[int, ...], strides: tuple[int, ...], norm: str = "batch") -> None:
        super().__init__()
        self.blocks, normalize = nn.Sequential(), normalization(norm)
        for before, after, stride in zip(widths[:-1], widths[1:], strides, strict=True):
            # No bias before a normalization, which would remove it.
            conv = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
            self.blocks.append(nn.Sequential(conv, normalize(after), nn.ReLU(inplace=True)))
        self.feature_dim, self.channels = widths[-1], widths[0]
        self.define_stages(stages=tuple(f"blocks.{number}" for number in range(len(strides))), widths=widths[1:])

    def pool(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, or a *bottleneck*: a 3x3 convolution between two of 1x1.

    The first 3x3 convolution has the stride. ``width`` are the channels of the convolutions, of which the last one of a
    bottleneck has four times as many.
    """

    def __init__(self, before: int, width: int, *, stride: int, bottleneck: bool, normalize: Normalize) -> None:
        super().__init__()
        convolutions = (
            ((width, 1, 1), (width, 3, stride), (_EXPANSION * width, 1, 1))
            if bottleneck
            else ((width, 3, stride), (width, 3, 1))
        )
        self._depth, channels = len(convolutions), before
        for number, (after, size, step) in enumerate(convolutions, start=1):
            self.add_module(f"conv{number}", _conv(channels, after, size, step))
            self.add_module(f"bn{number}", normalize(after))
            channels = after
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != channels:
            self.downsample = nn.Sequential(_conv(before, channels, 1, stride), normalize(channels))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for number in range(1, self._depth + 1):
            out = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(out))
            if number < self._depth:
                out = self.relu(out)
        out += x if self.downsample is None else self.downsample(x)
        output: Tensor = self.relu(out)
        return output


class ResNetEncoder(Encoder):
    """ResNet without classifier; its four groups of residual blocks are the stages.

    ``layers`` are the numbers of blocks of each stage; ``normalize`` builds the normalization of a number of channels.
    """

    def __init__(self, layers: Sequence[int], *, bottleneck: bool, normalize: Normalize) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = normalize(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        before, expansion = 64, _EXPANSION if bottleneck else 1
        for number, (width, count) in enumerate(zip(_WIDTHS, layers, strict=True), start=1):
            stage = nn.Sequential()
            for stride in (1 if number == 1 else 2, *[1] * (count - 1)):
                stage.append(ResidualBlock(before, width, stride=stride, bottleneck=bottleneck, normalize=normalize))
                before = width * expansion
            self.add_module(f"layer{number}", stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        nn.Linear(before, _NUM_CLASSES)  # for its draws
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.feature_dim = before
        self.define_stages(
            stages=("layer1", "layer2", "layer3", "layer4"), widths=tuple(width * expansion for width in _WIDTHS)
        )

    def run_stem(self, images: Tensor) -> Tensor:
        features: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return features

    def pool(self, x: Tensor) -> Tensor:
        return torch.flatten(self.avgpool(x), 1)


def normalization(norm: str) -> Normalize:
    """Return a function that builds the normalization of a number of channels: batch or group normalization.

    The latter has no running statistics (Wu and He, ECCV 2018, arXiv 1803.08494) and gcd(32, channels) groups.
    """
    makers: dict[str, Normalize] = {
        "batch": nn.BatchNorm2d,
        "group": lambda channels: nn.GroupNorm(math.gcd(32, channels), channels),
    }
    if norm not in makers:
        raise InputError(f"encoder.norm={norm} is not valid; choose one of {', '.join(makers)}")
    return makers[norm]


def conv_small(*, channels: int, size: int, width: int = 32, norm: str = "batch") -> Encoder:
    """Build a small convolutional encoder that trains fast on a CPU, for images of 8x8 to 96x96 (at least 4x4).

    The first of four blocks has ``width`` channels, the others have 2, 4 and 4 times as many: ``feature_dim = 4 *
    width``. ``norm`` as in `normalization`. The blocks halve the image twice below 16 pixels, four times from 64 pixels
    and three times in between, so that the widest blocks see 2x2 to 6x6 positions.
    """
    _check_image_size("conv_small", channels=channels, size=size, smallest=4)
    check_arguments("encoder", width=width)
    strides = (2 if size >= 64 else 1, 2, 2, 2 if size >= 16 else 1)
    return ConvSmall(widths=(channels, width, 2 * width, 4 * width, 4 * width), strides=strides, norm=norm)


def resnet(*, depth: int, channels: int, size: int, stem: str = "small", norm: str = "batch") -> Encoder:
    """Build torchvision's ResNet of 18, 34 or 50 layers without its classifier; h has 512, 512 or 2048 features."""
    _check_image_size(f"resnet{depth}", channels=channels, size=size, smallest=1)
    check_arguments("encoder", stem=stem)
    encoder = ResNetEncoder(_BLOCKS[depth], bottleneck=depth >= 50, normalize=normalization(norm))
    if stem == "small":
        encoder.conv1 = nn.Conv2d(channels, 64, 3, stride=1, padding=1, bias=False)
        encoder.maxpool = nn.Identity()
    elif channels != 3:
        encoder.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    # torchvision's initialization, repeated because the first convolution may have been replaced.
    nn.init.kaiming_normal_(encoder.conv1.weight, mode="fan_out", nonlinearity="relu")
    encoder.channels = channels
    return encoder


resnet18 = partial(resnet, depth=18)
resnet34 = partial(resnet, depth=34)
resnet50 = partial(resnet, depth=50)


def vit(
    *,
    channels: int,
    size: int,
    patch: int = 4,
    depth: int = 12,
    width: int = 192,
    heads: int = 3,
    pool: str = "token",
    positions: str = "learned",
    registers: int = 0,
) -> Encoder:
    """Build torchvision's VisionTransformer; `vit_tiny`, `vit_small`, `vit_base` have DeiT's sizes (arXiv 2012.12877).

    ``width`` is the length of a token and of h; the hidden layer of a block is four times as wide.
    """
    _check_image_size("vit", channels=channels, size=size, smallest=1)
    check_arguments("encoder", patch=patch, depth=depth, width=width, heads=heads, pool=pool, positions=positions)
    check_arguments("encoder", registers=registers)
    _check_divisible(size, patch=patch, width=width, heads=heads)
    if positions == "sincos" and width % 4:
        raise InputError(
            f"encoder.positions=sincos but encoder.width={width} is not a multiple of 4; set encoder.width to a "
            "multiple of 4, or encoder.positions=learned"
        )
    from fedssl.encoders.torchvision_networks import ViTEncoder  # here: slow import

    encoder = ViTEncoder(
        size=size,
        patch=patch,
        depth=depth,
        heads=heads,
        width=width,
        pool=pool,
        fixed_positions=positions == "sincos",
        registers=registers,
    )
    if channels != 3:
        projection = nn.Conv2d(channels, width, patch, patch)
        nn.init.trunc_normal_(projection.weight, std=math.sqrt(1 / (channels * patch * patch)))
        nn.init.constant_(projection.get_parameter("bias"), 0)
        encoder.conv_proj = projection
    encoder.channels = channels
    return encoder


vit_tiny = vit
vit_small = partial(vit, width=384, heads=6)
vit_base = partial(vit, width=768, heads=12)


def timm(*, name: str, channels: int, size: int) -> Encoder:
    """Build timm's network of this name without its classifier, such as ``vit_small_patch16_224``.

    Needs timm, the extra ``timm``.
    """
    check_arguments("encoder", name=name)
    _check_image_size(f"encoder.name={name}", channels=channels, size=size, smallest=1)
    require_timm("encoder=timm")
    from fedssl.encoders.timm_networks import build_timm  # here: slow import

    return build_timm(name, channels=channels, size=size)


def torchvision(*, name: str, channels: int, size: int) -> Encoder:
    """Build torchvision's classification network of this name without its classifier, such as ``efficientnet_b0``."""
    check_arguments("encoder", name=name)
    _check_image_size(f"encoder.name={name}", channels=channels, size=size, smallest=1)
    from fedssl.encoders.torchvision_networks import build_torchvision  # here: slow import

    return build_torchvision(name, channels=channels, size=size)


def _check_image_size(name: str, *, channels: int, size: int, smallest: int) -> None:
    check_arguments("encoder", channels=channels)
    if size < smallest:
        raise InputError(
            f"{name}: the images have {size}x{size} pixels but need at least {smallest}x{smallest}; raise dataset.size"
        )


def _check_divisible(size: int, *, patch: int, width: int, heads: int) -> None:
    if size % patch:
        fitting = [divisor for divisor in range(1, size) if size % divisor == 0]
        raise InputError(
            f"encoder.patch={patch} does not divide the {size}x{size} pixels of an image; "
            f"set encoder.patch to one of {fitting}"
        )
    if width % heads:
        raise InputError(f"encoder.heads={heads} does not divide encoder.width={width}; set encoder.heads=1 or another")


def _conv(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
