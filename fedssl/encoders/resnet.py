"""Residual networks with the layers, names and random numbers of torchvision's.

They are written here because torchvision imports torch's compiler: two seconds, and 90 MB of each process.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedssl.encoders.base import Encoder

_WIDTHS = (64, 128, 256, 512)  # of the stages, before the expansion
_EXPANSION = 4  # of a bottleneck
_NUM_CLASSES = 1000  # of torchvision's classifier, whose weights are drawn too

Normalize = Callable[[int], nn.Module]  # builds the normalization of a number of channels


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


def _conv(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
