"""Constants and helpers of secure aggregation that server and clients share (Flower's SecAgg+ protocol)."""

import numpy as np

from fedssl.arrays import Layers

SECAGG_CONFIG_KEY = "secaggplus_configs"  # Flower's name of the record with the stages of the protocol
MIN_CLIENTS = 3  # of two clients, each computes the other's update from the sum
# How updates become integers under masks. With other values, masks may not cover all of a number.
SECAGG_PARAMETERS = {"target_range": 1 << 22, "mod_range": 1 << 32, "max_weight": 1.0}


def summed_names(layers: Layers) -> list[str]:
    """Return the names of the layers that are summed, in order: all but integer counters."""
    return [name for name, array in layers.items() if array.dtype.kind == "f"]


def delta_of(layers: Layers, start: Layers) -> np.ndarray:
    """Return the change of all summed layers as one float64 vector."""
    deltas = [layers[name].astype(np.float64) - start[name] for name in summed_names(start)]
    return np.concatenate([delta.reshape(-1) for delta in deltas])
