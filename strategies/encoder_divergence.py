"""Divergence of an encoder during training: d of FedU's DAPU (Zhuang et al., ICCV 2021, Eq. 3) and of FedEMA.

Eq. 3 is the sum of squares over all weights (``squared_l2``). The authors' code, which produced the paper's numbers,
uses the mean over the convolution kernels of the root of that sum (``mean_conv_l2``). The authors have ResNets only.
Without trained convolution kernels, as in vision transformers, ``mean_conv_l2`` is the same mean over all trained
weights of the encoder. Only weights that are trained in the current stage are included. LoRA's products count as the
weights that they are added to.
"""

import math

import numpy as np
from torch import nn

from fedssl.arrays import GlobalLayers, Layers
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import global_layers, read_layers
from fedssl.rules import Problem

DISTANCES = ("mean_conv_l2", "squared_l2")


def distance_problem(method: SSLMethod, *, distance: str) -> Problem:
    """Return why there is no distance: nothing of the encoder is trained."""
    if any(parameter.requires_grad for parameter in method.encoder.parameters()):
        return None
    return (
        f"strategy.distance={distance} measures how far training moves the encoder, of which nothing is trained; "
        "set another strategy, or strategy.predictor=global if it is fedu"
    )


def distance_names(method: SSLMethod, *, distance: str) -> list[str]:
    """Return the names of the weights and factors over which the distance is computed in the current stage.

    "squared_l2": all trained weights of the encoder. "mean_conv_l2": the convolution kernels among them, or all of them
    without any kernel. Kernels of shortcuts ("downsample") are excluded, as in the authors' code (17 kernels in a
    ResNet-18), and so is a patch embedding, which is a convolution only in its implementation.
    """
    parameters = method.encoder.named_parameters(prefix="encoder")
    trained = [name for name, parameter in parameters if parameter.requires_grad]
    if distance == "squared_l2":
        return trained
    kernels = {
        f"encoder.{name}.weight"
        for name, module in method.encoder.named_modules()
        if isinstance(module, nn.Conv2d) and "downsample" not in name and name != method.encoder.patch_embedding
    }
    return [name for name in trained if method.product_names.get(name, name) in kernels] or trained


def divergence(trained: GlobalLayers, start: Layers, *, distance: str) -> float:
    """Return the distance of trained weights from earlier ones, e.g. the downloaded global weights.

    It is mean_l ||w_l - g_l|| ("mean_conv_l2"), or sum_l ||w_l - g_l||^2 ("squared_l2", Eq. 3), g_l at the start: at
    least 0, or non-finite if a weight is. ``trained`` are the layers of `distance_names`, at least one; other layers of
    ``start`` are ignored.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = trained.squared_distances(start).values()
    if distance == "squared_l2":
        return sum(squares)  # Eq. 3
    return sum(math.sqrt(square) for square in squares) / len(squares)


def encoder_divergence(method: SSLMethod, start: Layers, *, distance: str) -> float:
    """Return the `divergence` of a method's current encoder from ``start``."""
    layers = read_layers(method, distance_names(method, distance=distance))
    return divergence(global_layers(method, layers), start, distance=distance)
