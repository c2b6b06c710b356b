"""Constants and helpers of secure aggregation that server and clients share (Flower's SecAgg+ protocol).

A round has four phases, each a message to every client and its reply, with a record `SECAGG_CONFIG_KEY`:

==========================  ==============================================  ===================================
phase (``stage``)           message                                         reply
==========================  ==============================================  ===================================
``setup``                   graph, quantization, mask generator             two public keys, mask generator
``share_keys``              public keys of the neighbors                    encrypted shares for each neighbor
``collect_masked_vectors``  encrypted shares from each neighbor, the plan   masked update
``unmask``                  neighbors that survived, and that dropped out   a share of the seed or of the mask key
==========================  ==============================================  ===================================
"""

import numpy as np

from fedssl.arrays import Layers

SECAGG_CONFIG_KEY = "secaggplus_configs"  # Flower's name of the record with the stages of the protocol
SETUP, SHARE_KEYS, COLLECT, UNMASK = PHASES = ("setup", "share_keys", "collect_masked_vectors", "unmask")
MASK_GENERATOR = "mask_generator"  # not a key of Flower: its clients do not reply it and use ``mt19937``
MIN_CLIENTS = 3  # of two clients, each computes the other's update from the sum
TARGET_RANGE = 1 << 22
# How updates become integers under masks. With other values, masks may not cover all of a number.
SECAGG_PARAMETERS = {"target_range": TARGET_RANGE, "mod_range": 1 << 32}
UNIFORM_WEIGHT = 1  # max_weight of a round in which all clients have this weight; larger ones are numbers of images
MAX_WEIGHT = TARGET_RANGE  # the weight of one image is a step at least
MAX_CLIENTS = (1 << 32) // TARGET_RANGE - 1  # more quantized values may exceed the modulus


def summed_names(layers: Layers) -> list[str]:
    """Return the names of the layers that are summed, in order: all but integer counters."""
    return [name for name, array in layers.items() if array.dtype.kind == "f"]


def summed_size(layers: Layers) -> int:
    """Return the length of `delta_of`."""
    return sum(layers[name].size for name in summed_names(layers))


def delta_of(layers: Layers, start: Layers) -> np.ndarray:
    """Return the change of all summed layers as one float64 vector."""
    deltas = [layers[name].astype(np.float64) - start[name] for name in summed_names(start)]
    return np.concatenate([delta.reshape(-1) for delta in deltas])
