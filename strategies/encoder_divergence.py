"""How far training moved an encoder: d of FedU's DAPU (Zhuang et al., ICCV 2021, Eq. 3) and of FedEMA.

Eq. 3 has the sum of squares over all weights (``squared_l2``); the authors' code, from which the numbers of the paper
come, the mean over the convolution kernels of the root of that sum (``mean_conv_l2``). The authors have ResNets only.
Where no convolution kernel is trained, which is so in vision transformers, ``mean_conv_l2`` is here the same mean over
all weights of the encoder that are trained. Either way only what is trained at present counts, stage by stage.
"""

import math

import numpy as np
from torch import nn

from fedssl.arrays import Layers, inner_products
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod

DISTANCES = ("mean_conv_l2", "squared_l2")


def distance_names(method: SSLMethod, *, distance: str) -> list[str]:
    """Names of the weights that the distance is made of, in the stage that the method is in.

    "squared_l2": all weights of the encoder that are trained. "mean_conv_l2": of these the kernels of convolutions, or
    all, if no kernel is among them. Kernels of shortcuts ("downsample") do not count, as in the authors' code (17
    kernels in a ResNet-18), nor does a patch embedding, which is a convolution in torch only.

    Raises
    ------
    InputError
        Nothing of the encoder is trained.
    """
    parameters = method.encoder.named_parameters(prefix="encoder")
    trained = [name for name, parameter in parameters if parameter.requires_grad]
    if not trained:
        raise InputError(
            f"strategy.distance={distance} measures how far training moves the encoder, of which nothing is trained; "
            "set another strategy, or strategy.predictor=global if it is fedu"
        )
    if distance == "squared_l2":
        return trained
    kernels = {
        f"encoder.{name}.weight"
        for name, module in method.encoder.named_modules()
        if isinstance(module, nn.Conv2d) and "downsample" not in name and name != method.encoder.patch_embedding
    }
    return [name for name in trained if name in kernels] or trained


def divergence(trained: Layers, start: Layers, *, distance: str) -> float:
    """Distance of trained weights from earlier ones, e.g. the global ones that the client had received.

    Parameters
    ----------
    trained : Layers
        The weights that `distance_names` names; at least one.
    start : Layers
        The earlier ones; layers that are not in ``trained`` do not count.
    distance : {"mean_conv_l2", "squared_l2"}
        mean_l ||w_l - g_l||, or sum_l ||w_l - g_l||^2 (Eq. 3), g_l at the start.

    Returns
    -------
    float
        At least 0, or not finite if a weight is not.
    """
    squares = []
    with np.errstate(over="ignore", invalid="ignore"):
        for name, weight in trained.items():
            difference = np.asarray(weight - start[name])
            squares.append(inner_products([difference], difference)[0][1])
    if distance == "squared_l2":
        return sum(squares)  # Eq. 3
    return sum(math.sqrt(square) for square in squares) / len(squares)


def encoder_divergence(method: SSLMethod, start: Layers, *, distance: str) -> float:
    """`divergence` of a method's encoder, as it is now, from ``start``."""
    names = distance_names(method, distance=distance)
    trained = {name: method.named_tensors[name].detach().contiguous().cpu().numpy() for name in names}
    return divergence(trained, start, distance=distance)
