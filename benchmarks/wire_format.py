"""What it costs to bring a model into the form in which it travels, and what that form weighs.

    uv run python benchmarks/wire_format.py

ResNet-18 with SimCLR's head (11.5 M weights), one thread. Times are beside one pass over memory, i.e. a copy of the
model into memory that is there already, all in turn in one run:
1. for every wire dtype: packing a client's update (differences to what it started from, where they are shortened) and
   unpacking it at the server, and the bytes and HTTP objects of the reply as Flower sends it;
2. the same reply with one array per layer, as Flower's own `ArrayRecord` would send it, and the time that Flower takes
   to serialise either.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for what the engines share

from fedssl.arrays import Layers
from fedssl.config.load import compose
from fedssl.machine.threads import tune_allocator
from fedssl.methods.build import build_method
from fedssl.model_arrays import exchanged_layers
from fedssl.wire.records import arrays_to_record, encode_arrays
from fedssl.wire.wire_format import WIRE_DTYPES, pack, unpack
from simulation.grid import set_task_identity


def models() -> tuple[Layers, Layers]:
    """What a client starts from, and what training has made of it."""
    start = exchanged_layers(build_method(compose(["encoder=resnet18"]).model))
    random = np.random.default_rng(0)
    trained = {
        name: (array + 1e-3 * random.standard_normal(array.shape) if array.dtype.kind == "f" else array + place).astype(
            array.dtype
        )
        for place, (name, array) in enumerate(start.items())
    }
    return start, trained


def serialised(content: RecordDict) -> tuple[int, int]:
    """Bytes and objects that Flower sends of a message."""
    message = Message(content, 2, "train")
    with no_object_id_recompute():  # as Flower's grid does
        parts = [part.deflate() for part in get_all_nested_objects(message).values()]
    return sum(map(len, parts)), len(parts)


def in_turn(jobs: dict[str, Callable[[], object]], *, repeats: int = 21) -> dict[str, float]:
    """Median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 2):
        for name, job in jobs.items():
            begin = time.process_time()
            job()
            times[name].append(time.process_time() - begin)
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    tune_allocator()
    set_task_identity()
    start, trained = models()
    print(f"torch {torch.__version__}, {sum(array.size for array in start.values()) / 1e6:.1f} M numbers")
    target = {name: array.copy() for name, array in start.items()}

    def one_pass() -> None:
        for name, array in trained.items():
            np.copyto(target[name], array)

    packed = {wire_dtype: pack(trained, wire_dtype, start=start) for wire_dtype in WIRE_DTYPES}
    jobs: dict[str, Callable[[], object]] = {"one pass": one_pass}
    for wire_dtype in WIRE_DTYPES:
        jobs[f"pack {wire_dtype}"] = lambda wire_dtype=wire_dtype: pack(trained, wire_dtype, start=start)
        jobs[f"unpack {wire_dtype}"] = lambda wire_dtype=wire_dtype: unpack(packed[wire_dtype], wire_dtype, start=start)
    seconds = in_turn(jobs)
    print(f"one pass: {1e3 * seconds['one pass']:.1f} ms of CPU")
    for wire_dtype in WIRE_DTYPES:
        size, objects = serialised(RecordDict({"arrays": encode_arrays(trained, wire_dtype, start=start)}))
        there, back = (seconds[f"{what} {wire_dtype}"] for what in ("pack", "unpack"))
        shown = [f"{1e3 * taken:.1f} ms ({taken / seconds['one pass']:.1f}x)" for taken in (there, back)]
        print(f"{wire_dtype}: pack {shown[0]}, unpack {shown[1]}; {size / 1e6:.2f} MB in {objects} objects")
    forms = {"one array per layer": arrays_to_record, "packed": encode_arrays}
    seconds = in_turn(
        {name: lambda form=form: serialised(RecordDict({"arrays": form(trained)})) for name, form in forms.items()},
        repeats=7,
    )
    for name, form in forms.items():
        size, objects = serialised(RecordDict({"arrays": form(trained)}))
        print(f"fp32, {name}: {size / 1e6:.2f} MB in {objects} objects, {1e3 * seconds[name]:.0f} ms to serialise")


if __name__ == "__main__":
    main()
