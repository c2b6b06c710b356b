"""Residual networks with the layers, names and random numbers of torchvision's.

They are written here because torchvision imports torch's compiler: two seconds, and 90 MB of each process.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedssl.encoders.base import Encoder

_WIDTHS = (64, 128, 256, 512)  # of the stages, before the expansion
_NUM_CLASSES = 1000  # of torchvision's classifier, whose weights are drawn too

Normalize = Callable[[int], nn.Module]  # builds the normalization of a number of channels


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the first has the stride."""

    expansion = 1

    def __init__(
        self, before: int, width: int, *, stride: int, downsample: nn.Module | None, normalize: Normalize
    ) -> None:
        super().__init__()
        self.conv1 = _conv(before, width, 3, stride)
        self.bn1 = normalize(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = normalize(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        output: Tensor = self.relu(out)
        return output


class Bottleneck(nn.Module):
    """A 3x3 convolution, which has the stride, between two of 1x1, beside a shortcut."""

    expansion = 4

    def __init__(
        self, before: int, width: int, *, stride: int, downsample: nn.Module | None, normalize: Normalize
    ) -> None:
        super().__init__()
        self.conv1 = _conv(before, width, 1)
        self.bn1 = normalize(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = normalize(width)
        self.conv3 = _conv(width, self.expansion * width, 1)
        self.bn3 = normalize(self.expansion * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        output: Tensor = self.relu(out)
        return output


class ResNetEncoder(Encoder):
    """ResNet without classifier; its four groups of residual blocks are the stages.

    ``layers`` are the numbers of blocks of each stage; ``normalize`` builds the normalization of a number of channels.
    """

    def __init__(self, block: type[BasicBlock | Bottleneck], layers: Sequence[int], *, normalize: Normalize) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = normalize(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        before = 64
        for number, (width, count) in enumerate(zip(_WIDTHS, layers, strict=True), start=1):
            stage = nn.Sequential()
            for stride in (1 if number == 1 else 2, *[1] * (count - 1)):
                after = width * block.expansion
                downsample = None
                if stride != 1 or before != after:
                    downsample = nn.Sequential(_conv(before, after, 1, stride), normalize(after))
                stage.append(block(before, width, stride=stride, downsample=downsample, normalize=normalize))
                before = after
            self.add_module(f"layer{number}", stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        nn.Linear(before, _NUM_CLASSES)  # for its draws
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.feature_dim = before
        self.define_stages(
            stages=("layer1", "layer2", "layer3", "layer4"), widths=tuple(width * block.expansion for width in _WIDTHS)
        )

    def run_stem(self, images: Tensor) -> Tensor:
        features: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return features

    def pool(self, x: Tensor) -> Tensor:
        return torch.flatten(self.avgpool(x), 1)


def _conv(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
