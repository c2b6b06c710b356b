"""Rules, layers and updates that tests of strategies share."""

from functools import partial
from math import log

import numpy as np
import pytest

from fedssl.wire.messages import ClientUpdate
from strategies.eua import eua
from strategies.fedavg import fedavg
from strategies.krum import krum
from strategies.l_dawa import l_dawa
from strategies.loss_weighted import loss_weighted
from strategies.m_dawa import m_dawa
from strategies.robust import median, trimmed_mean

WEIGHTED_SUMS = {
    "fedavg": fedavg,
    "fedavg uniform": partial(fedavg, weighting="uniform"),
    "loss": loss_weighted,
    "l_dawa": l_dawa,
    "l_dawa examples": partial(l_dawa, weighting="examples"),
    "l_dawa loss": partial(l_dawa, weighting="loss"),
    "l_dawa scale": partial(l_dawa, buffers="scale"),
    "l_dawa normalize": partial(l_dawa, weighting="loss", buffers="scale", normalize=True),
    "m_dawa": m_dawa,
    "m_dawa scale": partial(m_dawa, buffers="scale"),
}
RULES = {**WEIGHTED_SUMS, "eua": eua, "median": median, "trimmed_mean": trimmed_mean}
RULES |= {"krum": krum, "multi-krum": partial(krum, select=3)}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
every_weighted_sum = pytest.mark.parametrize("rule", WEIGHTED_SUMS.values(), ids=WEIGHTED_SUMS.keys())


def layers(dtype=np.float32, **arrays):
    return {name: np.array(values, dtype) for name, values in arrays.items()}


def update(partition_id, arrays, num_examples=None, train_loss=None):
    return ClientUpdate(layers=arrays, partition_id=partition_id, num_examples=num_examples, train_loss=train_loss)


# Global a = (3, 4), b = (12, 0): |a| = 5, |b| = 12, |model| = 13.
# Client 0 has a = (4, 3), b = (0, 12), the same norms. Its products with the global layers are 24 and 0, so the cosines
# are 24/25 = 0.96 for a, 0 for b and 24/169 for the model. Client 1 equals the global model: all its cosines are 1.
# With 1 and 3 examples beta is (1/4, 3/4). So it is with losses ln 3 and 0, because exp(-ln 3) : exp(0) is 1/3 : 1.
GLOBAL = layers(a=[3, 4], b=[12, 0])
CLIENTS = [
    update(0, layers(a=[4, 3], b=[0, 12]), num_examples=1, train_loss=log(3)),
    update(1, layers(a=[3, 4], b=[12, 0]), num_examples=3, train_loss=0.0),
]
DELTA = 24 / 169


def model(seed, dtype=np.float32):
    """Layers of all kinds; ``fc.weight`` has many rows and a rest, ``conv.bias`` is zero in the first model."""
    random = np.random.default_rng(seed)
    return {
        "conv.weight": random.standard_normal((8, 3, 3, 3)).astype(dtype),
        "conv.bias": (seed * random.standard_normal(8)).astype(dtype),
        "bn.weight": random.uniform(0.5, 1.5, 8).astype(dtype),
        "bn.running_mean": random.standard_normal(8).astype(dtype),
        "bn.running_var": random.uniform(0.5, 1.5, 8).astype(dtype),
        "bn.num_batches_tracked": np.array(10 * seed + 3),
        "fc.weight": random.standard_normal((301, 301)).astype(dtype),
        "temperature": np.array(random.uniform(0.1, 1), dtype),
    }


def clients_of(start, number=5, dtype=np.float32):
    """Updates that keep something of the direction of ``start``."""
    updates = []
    for client in range(number):
        own = model(client + 1, dtype)
        mixed = {
            name: own[name] if array.dtype.kind == "i" else np.asarray(array + (client + 0.5) * own[name], dtype)
            for name, array in start.items()
        }
        updates.append(update(client, mixed, num_examples=10 + 7 * client, train_loss=4 + (client - 2) ** 2 / 2))
    return updates


def all_layers(updates):
    return [one.layers for one in updates]
