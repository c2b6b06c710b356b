"""Cost and size of the wire format of a model.

    uv run python benchmarks/wire_format.py

ResNet-18 with SimCLR's head (11.5 M weights), one thread. Times are relative to one memory pass, a copy of the model
into existing memory. All jobs are timed in turn.
1. For each wire dtype: packing a client's update (as differences to the starting model, where they are rounded),
   unpacking it at the server, and the bytes and HTTP objects of the reply in Flower.
2. The same reply with one array per layer, as in Flower's `ArrayRecord`, and the time that Flower needs to serialize
   both forms.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute

from benchmarks.common import make_parser, time_in_turn
from fedssl.arrays import Layers
from fedssl.config.constraint_table import WIRE_DTYPES
from fedssl.config.load import compose
from fedssl.flower_internals import set_task_identity
from fedssl.machine.process import set_allocator_thresholds
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_layers
from fedssl.wire.records import EXACT, Codec, arrays_to_record
from fedssl.wire.wire_format import pack, unpack


def models() -> tuple[Layers, Layers]:
    """Return the layers at the start, and after training."""
    start = exchanged_layers(build_method(compose(["encoder=resnet18"]).model))
    random = np.random.default_rng(0)
    trained = {
        name: (array + 1e-3 * random.standard_normal(array.shape) if array.dtype.kind == "f" else array + place).astype(
            array.dtype
        )
        for place, (name, array) in enumerate(start.items())
    }
    return start, trained


def serialize(content: RecordDict) -> tuple[int, int]:
    """Return the number of bytes and objects that Flower sends."""
    message = Message(content, 2, "train")
    with no_object_id_recompute():  # as Flower's grid does
        parts = [part.deflate() for part in get_all_nested_objects(message).values()]
    return sum(map(len, parts)), len(parts)


def median_seconds(jobs: dict[str, Callable[[], object]], *, turns: int = 21) -> dict[str, float]:
    seconds = time_in_turn(jobs, turns=turns, warmup=2, clock=time.process_time)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    set_allocator_thresholds()
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
    seconds = median_seconds(jobs)
    print(f"one pass: {1e3 * seconds['one pass']:.1f} ms of CPU")
    for wire_dtype in WIRE_DTYPES:
        size, objects = serialize(RecordDict({"arrays": Codec(wire_dtype).encode(trained, start=start)}))
        packing, unpacking = (seconds[f"{what} {wire_dtype}"] for what in ("pack", "unpack"))
        shown = [f"{1e3 * taken:.1f} ms ({taken / seconds['one pass']:.1f}x)" for taken in (packing, unpacking)]
        print(f"{wire_dtype}: pack {shown[0]}, unpack {shown[1]}; {size / 1e6:.2f} MB in {objects} objects")
    forms = {"one array per layer": arrays_to_record, "packed": EXACT.encode}
    seconds = median_seconds(
        {name: lambda form=form: serialize(RecordDict({"arrays": form(trained)})) for name, form in forms.items()},
        turns=7,
    )
    for name, form in forms.items():
        size, objects = serialize(RecordDict({"arrays": form(trained)}))
        print(f"fp32, {name}: {size / 1e6:.2f} MB in {objects} objects, {1e3 * seconds[name]:.0f} ms to serialize")


if __name__ == "__main__":
    main()
