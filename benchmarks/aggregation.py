"""Time and memory of the aggregation of ResNet-18 models (11 M weights, 122 layers), relative to memory bandwidth.

    uv run python benchmarks/aggregation.py            # 10 and 100 clients; 100 clients need 5 GB and a minute
    uv run python benchmarks/aggregation.py 10

For each number of clients K:
1. All updates in memory. Times are multiples of one memory pass (read K clients and the global model, write the result,
   at the measured copy bandwidth) and are compared with the form of L-DAWA's authors. Targets: FedAvg and Loss at most
   1.4 passes, L-DAWA and M-DAWA at most 3 and, with 10 clients, 3.5 times faster than the authors' form. "One buffer"
   is the bare arithmetic if the floating-point layers of a client lay in one buffer; messages have one for each layer.
2. Updates that arrive as messages. Time from the last message to the new model (target: at most 10 ms), and memory
   besides the global model and the current message (target: two models).
3. EUA, which needs all updates at once: time of its parts, memory besides the updates, and for up to 10 clients the
   form of its authors. Targets: 1.5 times the bare matrix product of the models with the reads that it and the sum
   need, 3 s for 100 clients on two cores, 25 times faster than the authors' form.

Repetitions are interleaved. Numbers are medians, with minima in parentheses: on a busy machine the minimum is closest
to the cost of the code.
"""

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch

from benchmarks.common import make_parser, time_in_turn
from fedssl.arrays import CACHE_TILE as LAYER_TILE
from fedssl.arrays import GlobalLayers, Layers, inner_products, is_weight
from fedssl.machine.process import default_threads, set_allocator_thresholds
from fedssl.wire.messages import ClientUpdate
from fedssl.wire.records import arrays_to_record, record_to_arrays
from strategies.eua import EUAAggregator, solve
from strategies.fedavg import fedavg
from strategies.gram_matrix import deviation_gram
from strategies.l_dawa import l_dawa
from strategies.loss_weighted import loss_weighted
from strategies.m_dawa import m_dawa
from strategies.update_store import in_memory
from strategies.weighted_sum import WeightedSum, num_per_block

CACHE_TILE = 32768  # numbers of each client in one product
EUA_TARGET = 1.5

RULES = {
    "FedAvg": WeightedSum(weighting="examples"),
    "Loss": WeightedSum(weighting="loss"),
    "L-DAWA": WeightedSum(scale="layer"),
    "M-DAWA": WeightedSum(scale="model"),
}


def resnet18() -> Layers:
    """Return the layers of a ResNet-18 for small images with 128 outputs."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=128)
    model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def make_update(layers: Layers, client: int) -> ClientUpdate:
    """Return an update that differs from the global layers by noise of a tenth of their standard deviation."""
    random = np.random.default_rng(client + 1)

    def noisy(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f":
            return array + client + 1
        noise = random.standard_normal(array.shape, array.dtype)
        noise *= 0.1 * (array.std() + 0.01)
        return np.add(array, noise, out=noise)

    return ClientUpdate(
        layers=in_one_buffer({name: noisy(array) for name, array in layers.items()}),
        partition_id=client,
        num_examples=100 + client,
        train_loss=4 + float(random.uniform()),
    )


def in_one_buffer(layers: Layers) -> Layers:
    """Return the layers, those of floating-point numbers as consecutive parts of one buffer."""
    floats = [name for name, array in layers.items() if array.dtype.kind == "f"]
    buffer = np.concatenate([layers[name].reshape(-1) for name in floats])
    parts = np.split(buffer, np.cumsum([layers[name].size for name in floats])[:-1])
    return layers | {name: part.reshape(layers[name].shape) for name, part in zip(floats, parts, strict=True)}


def tiles_of_buffer(layers: Layers) -> Layers:
    """Return the buffer of `in_one_buffer` in tiles."""
    buffer = next(array.base for array in layers.values() if array.dtype.kind == "f")
    assert buffer is not None
    return {str(start): buffer[start : start + LAYER_TILE] for start in range(0, len(buffer), LAYER_TILE)}


def bare_sum(tiles: GlobalLayers, models: list[Layers], result: Layers) -> None:
    """Compute blocks of clients, the sum of the blocks and the division, everything tile by tile."""
    size = num_per_block(len(models))

    def add(name: str) -> None:
        total = torch.from_numpy(result[name])
        block = torch.empty_like(total)
        for first in range(0, len(models), size):
            sums = block if first else total
            torch.mul(torch.from_numpy(models[first][name]), 0.3, out=sums)
            for model in models[first + 1 : first + size]:
                sums.add_(torch.from_numpy(model[name]), alpha=0.3)
            if first:
                total.add_(block)
        total.div_(7)

    tiles.parallel_for(add)


def l_dawa_of_authors(global_layers: list[np.ndarray], models: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Compute L-DAWA in the authors' form: per array two norms, a product and a scaled copy, then the mean."""

    def scaled(w: np.ndarray, g: np.ndarray) -> np.ndarray:
        if w.ndim == 0 or np.linalg.norm(w) == 0:
            return w
        return min(np.sum(w * g) / (np.linalg.norm(w) * np.linalg.norm(g)), 1.0) * w

    copies = [[scaled(w, g) for w, g in zip(model, global_layers, strict=True)] for model in models]
    return [reduce(np.add, arrays) / len(models) for arrays in zip(*copies, strict=True)]


@dataclass
class Seconds:
    """Median and minimum of the repetitions."""

    median: float
    minimum: float

    def __str__(self) -> str:
        return f"{self.median * 1e3:8.1f} {f'({self.minimum * 1e3:.1f})':>8}"


def measure(candidates: dict[str, Callable[[], object]], repetitions: int) -> dict[str, Seconds]:
    seconds = time_in_turn(candidates, turns=repetitions)
    return {name: Seconds(statistics.median(values), min(values)) for name, values in seconds.items()}


def report_in_memory(layers: Layers, updates: list[ClientUpdate], repetitions: int) -> None:
    """Print part 1."""
    reference = GlobalLayers(layers)
    spare = {name: np.empty_like(array) for name, array in layers.items()}
    flat = np.concatenate([array.reshape(-1) for array in layers.values() if array.dtype.kind == "f"])
    flat_spare = np.empty_like(flat)
    arrays = list(layers.values())
    models = [list(update.layers.values()) for update in updates]
    tiles = GlobalLayers(tiles_of_buffer(layers))
    buffers = [tiles_of_buffer(update.layers) for update in updates]
    result = {name: np.empty_like(array) for name, array in tiles.layers.items()}

    def measure_products(name: str) -> None:
        inner_products([buffer[name] for buffer in buffers], tiles.layers[name])

    def bare_l_dawa() -> None:
        tiles.parallel_for(measure_products)
        bare_sum(tiles, buffers, result)

    seconds = measure(
        {
            "copy": lambda: np.copyto(flat_spare, flat),
            "copy, threads": lambda: reference.parallel_for(lambda name: np.copyto(spare[name], layers[name])),
            "FedAvg": lambda: fedavg(layers, updates),
            "Loss": lambda: loss_weighted(layers, updates),
            "L-DAWA": lambda: l_dawa(layers, updates),
            "M-DAWA": lambda: m_dawa(layers, updates),
            "FedAvg, one buffer": lambda: bare_sum(tiles, buffers, result),
            "L-DAWA, one buffer": bare_l_dawa,
            "L-DAWA, authors' form": lambda: l_dawa_of_authors(arrays, models),
        },
        repetitions,
    )
    passes = (len(updates) + 2) / 2
    copies = seconds["copy"], seconds["copy, threads"]
    floor = Seconds(passes * min(each.median for each in copies), passes * min(each.minimum for each in copies))
    print(f"\nK={len(updates)}, in memory{'':20}ms {'passes':>18} {'authors/ours':>18}")
    print(f"{'one pass':24}{floor}")
    print(f"{'one pass, one thread':24}{Seconds(passes * copies[0].median, passes * copies[0].minimum)}")
    slowest = seconds["L-DAWA, authors' form"]
    for name, own in list(seconds.items())[len(copies) :]:
        print(
            f"{name:24}{own}"
            f" {own.median / floor.median:9.2f} {f'({own.minimum / floor.minimum:.2f})':>8}"
            f" {slowest.median / own.median:9.1f} {f'({slowest.minimum / own.minimum:.1f})':>8}"
        )


def stream(rule: WeightedSum, global_layers: Layers, updates: Iterator[ClientUpdate], *, number: int) -> float:
    """Aggregate the updates one by one as a round of ``number`` clients does; return seconds from the last one on."""
    reference = GlobalLayers(global_layers)
    rule.set_clients(list(range(number)))
    rule.start(reference)
    for update in updates:
        start = time.perf_counter()
        reference.check(update.layers)
        rule.add(update, reference.cosines_of(update.layers))
    rule.finish()
    return time.perf_counter() - start


def report_streaming(layers: Layers, updates: list[ClientUpdate], repetitions: int) -> None:
    """Print part 2."""
    records = [arrays_to_record(update.layers) for update in updates]
    model = sum(array.nbytes for array in layers.values())

    def received() -> Iterator[ClientUpdate]:
        for update, record in zip(updates, records, strict=True):
            yield replace(update, layers=record_to_arrays(record))

    number = len(updates)
    after: dict[str, list[float]] = {name: [] for name in RULES}
    for _ in range(repetitions):
        for name, rule in RULES.items():
            after[name].append(stream(rule, layers, received(), number=number))
    print(f"\nK={len(updates)}, one by one{'':9}ms after the last     models of extra memory")
    for name, rule in RULES.items():
        tracemalloc.start()
        stream(rule, layers, received(), number=number)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(f"{name:24}{Seconds(statistics.median(after[name]), min(after[name]))} {peak / model:26.2f}")


def eua_of_authors(global_layers: Layers, models: list[Layers]) -> torch.Tensor:
    """Compute EUA's direction in the authors' form: unit deviations as columns, pairwise products, steps on p."""
    names = [name for name, array in global_layers.items() if is_weight(name, array)]

    def flat(layers: Layers) -> torch.Tensor:
        return torch.cat([torch.from_numpy(layers[name]).reshape(-1) for name in names])

    theta, number = flat(global_layers), len(models)
    columns = torch.empty(len(theta), number)
    for k, layers in enumerate(models):
        delta = theta - flat(layers)
        columns[:, k] = 2 * delta / delta.norm()
    gram = torch.tensor([[float(columns[:, i] @ columns[:, j]) for j in range(number)] for i in range(number)])
    p = torch.full((number,), 1 / number)
    for _ in range(250):
        best = torch.zeros(number)
        best[(gram @ p).argmin()] = 1
        move = best - p
        step = float(-(move @ gram @ p) / (move @ gram @ move).clamp_min(1e-12))
        p = p + min(max(step, 0), 1) * move
        if step * move.abs().sum() < 1e-5:
            break
    return columns @ p


def bare_product(weights: GlobalLayers, models: list[Layers], factors: np.ndarray) -> None:
    """Compute products of the models and a weighted sum of those with a factor, without deviations and checks."""
    used = np.flatnonzero(factors)

    def multiply(name: str) -> None:
        arrays = [torch.from_numpy(model[name].reshape(-1)) for model in models]
        products, total = torch.zeros(len(arrays), len(arrays)), torch.zeros(len(arrays[0]))
        buffer = torch.empty(len(arrays), min(CACHE_TILE, len(total)))
        for start in range(0, len(total), CACHE_TILE):
            tile = [array[start : start + CACHE_TILE] for array in arrays]
            x = buffer[:, : len(tile[0])]
            torch.stack(tile, out=x)
            products.addmm_(x, x.T)
            for k in used:
                total[start : start + CACHE_TILE].add_(tile[k], alpha=float(factors[k]))

    weights.parallel_for(multiply)


def report_eua(layers: Layers, updates: list[ClientUpdate], repetitions: int) -> None:
    """Print part 3."""
    models = [update.layers for update in updates]
    weights = GlobalLayers({name: array for name, array in layers.items() if is_weight(name, array)})
    gram = deviation_gram(weights, in_memory(models))
    reference = GlobalLayers(layers)
    all_cosines = [reference.cosines_of(model) for model in models]

    def eua() -> None:
        rule = EUAAggregator()
        rule.start(reference)
        for update, cosines in zip(updates, all_cosines, strict=True):
            rule.add(update, cosines)
        rule.finish()

    candidates = {
        "Gram matrix": lambda: deviation_gram(weights, in_memory(models)),
        "weights p": lambda: solve(gram),
        "EUA": eua,
        "bare product and reads": lambda: bare_product(weights, models, solve(gram).factors),
    }
    if len(updates) <= 10:
        candidates["EUA, authors' form"] = lambda: eua_of_authors(layers, models)
    seconds = measure(candidates, repetitions)
    tracemalloc.start()
    eua()
    peak = tracemalloc.get_traced_memory()[1] / sum(array.nbytes for array in layers.values())
    tracemalloc.stop()
    print(f"\nK={len(updates)}, all at once{'':18}ms {'times EUA':>18}")
    for name, own in seconds.items():
        print(f"{name:24}{own} {own.median / seconds['EUA'].median:18.2f}")
    ratio = seconds["EUA"].median / seconds["bare product and reads"].median
    print(f"{'EUA / bare product':24}{ratio:8.2f}{'*' if ratio > EUA_TARGET else ''} (target {EUA_TARGET})")
    print(f"{'EUA, memory in models':24}{peak:8.2f} besides the updates, with the new model")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("clients", nargs="*", type=int, default=[10, 100], help="numbers of clients")
    numbers = parser.parse_args().clients
    set_allocator_thresholds()
    torch.set_num_threads(default_threads(32))
    layers = make_update(resnet18(), -1).layers  # noise, because the authors' form divides by zero biases
    updates = [make_update(layers, client) for client in range(max(numbers))]
    print(f"{torch.get_num_threads()} threads")
    for number in numbers:
        repetitions = max(3, 200 // number)
        report_in_memory(layers, updates[:number], repetitions)
        report_streaming(layers, updates[:number], repetitions)
        report_eua(layers, updates[:number], max(3, repetitions // 4))


if __name__ == "__main__":
    main()
