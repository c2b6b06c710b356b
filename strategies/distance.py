"""How far training moved an encoder: d of FedU's DAPU (Zhuang et al., ICCV 2021, Eq. 3) and of FedEMA.

Eq. 3 has the sum of squares over all weights (``squared_l2``); the authors' code, from which the numbers of the paper
come, the mean over the convolution kernels of the root of that sum (``mean_conv_l2``).
"""

import math

import numpy as np

from fedssl.errors import InputError
from fedssl.layers import Layers, is_weight, products
from fedssl.methods.base import SSLMethod

DISTANCES = ("mean_conv_l2", "squared_l2")


def compared(layers: Layers, *, distance: str) -> list[str]:
    """Names of the encoder's weights that the distance is made of.

    "squared_l2": all. "mean_conv_l2": kernels of convolutions, i.e. arrays ``(out, in, height, width)``, without those
    of shortcuts ("downsample"); 17 in a ResNet-18.

    Raises
    ------
    InputError
        The encoder has no such kernel.
    """
    weights = [name for name, array in layers.items() if name.startswith("encoder.") and is_weight(name, array)]
    if distance == "squared_l2":
        return weights
    kernels = [name for name in weights if layers[name].ndim == 4 and "downsample" not in name]
    if not kernels:
        raise InputError(f"strategy.distance={distance} but the encoder has no convolution; set it to squared_l2")
    return kernels


def divergence(trained: Layers, start: Layers, *, distance: str) -> float:
    """Distance of a trained encoder from an earlier one, e.g. the global one that the client had received.

    Parameters
    ----------
    trained : Layers
        Has at least the layers that `compared` names.
    start : Layers
        The earlier layers; those that `compared` does not name do not count.
    distance : {"mean_conv_l2", "squared_l2"}
        mean_l ||w_l - g_l|| over the convolution kernels, or sum_l ||w_l - g_l||^2 over all weights (Eq. 3), g_l at
        the start.

    Returns
    -------
    float
        At least 0, or not finite if a weight is not.
    """
    squares = []
    with np.errstate(over="ignore", invalid="ignore"):
        for name in compared(start, distance=distance):
            difference = np.asarray(trained[name] - start[name])
            squares.append(products([difference], difference)[0][1])
    if distance == "squared_l2":
        return sum(squares)  # Eq. 3
    return sum(math.sqrt(square) for square in squares) / len(squares)


def moved(method: SSLMethod, start: Layers, *, distance: str) -> float:
    """`divergence` of what is trained of a method's encoder, as it is now, from ``start``."""
    names = [name for name in compared(start, distance=distance) if method.tensors[name].requires_grad]
    trained = {name: method.tensors[name].detach().cpu().numpy() for name in names}
    return divergence(trained, {name: start[name] for name in names}, distance=distance) if names else 0.0
