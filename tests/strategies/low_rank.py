"""Models with LoRA's factors for tests of strategies, and their transcription to dense weights."""

from dataclasses import replace

import numpy as np

from fedssl.arrays import GlobalLayers
from fedssl.low_rank_products import FactorPairs, LowRankLayer
from tests.strategies.made import update

FC = LowRankLayer("encoder.fc.weight", "encoder.fc.lora_A", "encoder.fc.lora_B", 4.0)
CONV = LowRankLayer("encoder.conv.weight", "encoder.conv.lora_A", "encoder.conv.lora_B", 0.5)


def low_rank_model(seed, dtype=np.float64, *, fixed_a=False):
    """Layers with two pairs of factors; without the factors A if they are fixed."""
    random = np.random.default_rng(seed)
    arrays = {
        "encoder.fc.lora_A": random.standard_normal((2, 9)),
        "encoder.fc.lora_B": random.standard_normal((5, 2)),
        "encoder.norm.running_var": random.uniform(0.5, 1.5, 5),
        "encoder.conv.lora_A": random.standard_normal((3, 8)),
        "encoder.conv.lora_B": random.standard_normal((6, 3)),
        "projector.weight": random.standard_normal((4, 5)),
        "projector.bias": random.standard_normal(4),
    }
    arrays = {name: array.astype(dtype) for name, array in arrays.items() if not (fixed_a and name.endswith("lora_A"))}
    return arrays | {"projector.num_batches_tracked": np.array(7 * seed)}


def pairs_of(*, fixed_a=False):
    if not fixed_a:
        return FactorPairs((FC, CONV))
    return FactorPairs((FC, CONV), {name: low_rank_model(99)[name] for name in (FC.a, CONV.a)})


def reference(dtype=np.float64, *, fixed_a=False):
    return GlobalLayers(low_rank_model(0, dtype, fixed_a=fixed_a), pairs_of(fixed_a=fixed_a))


def clients_near(start, number=5, *, moved=0.5):
    """Updates that keep something of the direction of ``start``."""
    updates = []
    for client in range(number):
        own = low_rank_model(client + 1, fixed_a=not start.first_factors)
        arrays = {
            name: own[name] if array.dtype.kind == "i" else np.asarray(array + moved * own[name], array.dtype)
            for name, array in start.layers.items()
        }
        updates.append(update(client, arrays, num_examples=10 + 7 * client, train_loss=4 + (client - 2) ** 2 / 2))
    return updates


def dense_layers(layers, pairs):
    """Layers in which each product is one dense weight, in float64."""
    dense = {}
    for name, array in layers.items():
        pair = next((pair for pair in pairs.layers if pair.b == name), None)
        if pair is not None:
            a = layers[pair.a] if pair.a in layers else pairs.fixed[pair.a]
            dense[pair.weight] = pair.scale * array.astype(np.float64) @ a.astype(np.float64)
        elif not name.endswith("lora_A"):
            dense[name] = array.astype(np.float64) if array.dtype.kind == "f" else array
    return dense


def dense_updates(updates, pairs):
    return [replace(one, layers=dense_layers(one.layers, pairs)) for one in updates]
