"""A perceptron with two hidden layers, for small images. Each layer is a stage for layer-wise training."""

from torch import Tensor, nn

from fedssl.encoders import Encoder


class Perceptron(Encoder):
    """Maps images ``(batch, channels, size, size)`` to representations ``(batch, width)``."""

    def __init__(self, *, channels: int, size: int, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(channels * size * size, width), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.feature_dim = width
        self.define_stages(stages=("first", "second"), widths=(width, width))

    def run_stem(self, images: Tensor) -> Tensor:
        return images.flatten(1)

    def pool(self, x: Tensor) -> Tensor:
        return x
