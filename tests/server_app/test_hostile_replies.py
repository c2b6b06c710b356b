"""Every part of a reply, damaged in every way: its client is dropped with a sentence, or used, and others count."""

import json
import math
import pickle
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedssl.wire.wire_format import TABLE
from server_app.exchanges.base import Reply
from server_app.messaging import receive
from server_app.round import Round
from tests.arrays import archive, npy
from tests.cases import some
from tests.federation import Federation
from tests.wire import arrived

KINDS = {
    **{dtype: [f"wire_dtype={dtype}"] for dtype in ("fp32", "bf16")},
    "LoRA": ["tuning=lora", "tuning.rank=2"],
    "products of LoRA": ["tuning=lora", "tuning.rank=2", "tuning.aggregation=svd", "wire_dtype=int8"],
    "control variates": ["strategy=scaffold", "wire_dtype=int8"],
    "parts for the server": ["method=orchestra", "method.projector.hidden_dim=16", "wire_dtype=fp16"],
    "several models": ["strategy=clustered", "strategy.num_images=16"],
    "all updates at once": ["strategy=median", "aggregation.max_norm_ratio=10"],
}
# Measure the memory of every n-th damage, because tracing takes three times as long.
TRACED = {"control variates": 5, "products of LoRA": 1}
NUMBERS = (-1, 2**63 - 1, 1.5, 1e308, math.nan, math.inf, [], [1], [0.5] * 1000)
VALUES = (*NUMBERS, "x", "\x1b[2J\n" * 1000, b"x", True, 2**64 - 1, ["x"] * 1000)


def damaged_bytes(array):
    """Yield damaged bytes of an array."""
    data, ones = npy(array), np.full(array.nbytes, 255, np.uint8)
    yield from (b"", b"x", data[:64], data[:-1], data + b"x", pickle.dumps(array), archive(array))
    for shape in ((10**12,), (0, 10**30), (-1, -1), (1,) * 65, (array.size, 1)):
        yield npy(array, shape=shape)
    for descr in ("|O", "<c16", "<f16", ">f4", "<U1000000000", [("a", "<f4")]):
        yield npy(array, descr=descr)
    yield npy(array, fortran_order=True)
    yield from (npy(array.astype(dtype)) for dtype in (np.float64, np.int64, np.bool_, np.float16))
    yield npy(ones.view(array.dtype))  # NaN, or -1
    yield npy((ones >> 1).view(array.dtype))  # NaN, or the largest number


def damaged_tables(table):
    """Yield damaged tables of layers."""
    wire_dtype, rows = json.loads(table.tobytes())
    (name, dtype, shape), *others = rows
    for row in (
        [name, "object", shape],
        [name, dtype, [*shape, 1]],
        [name, dtype, [2**31, 2**31]],
        ["\ud800", dtype, shape],
    ):
        yield [wire_dtype, [row, *others]]
    yield from (
        [wire_dtype, [*rows, rows[0]]],
        [wire_dtype, rows[::-1]],
        [wire_dtype, others],
        ["fp16", rows],
        {},
        [[]],
    )


def damages(content):
    """Changed copies of a content, with what was changed."""
    for key, record in content.items():
        yield f"{key} removed", {name: one for name, one in content.items() if name != key}
        yield f"{key} twice", {**content, f"{key}-1": record}
        for other in (ArrayRecord(), MetricRecord(), ConfigRecord({"x": 1})):
            yield f"{key} of another kind", {**content, key: other}
        kind = type(record)
        for name in ("spy", *record):
            values = [*record.items()]
            if name in record:
                yield f"{key} without {name}", {**content, key: kind({n: v for n, v in values if n != name})}
            for value in damaged_values(record, name):
                yield f"{key} with {name}={str(value)[:80]}", {**content, key: kind(dict(values) | {name: value})}


def damaged_values(record, name):
    if not isinstance(record, ArrayRecord):
        return NUMBERS if isinstance(record, MetricRecord) else VALUES
    if name not in record:
        return [Array(np.zeros(2, np.float32))]
    array = record[name].numpy()
    tables = damaged_tables(array) if name == TABLE else ()
    texts = [npy(np.frombuffer(json.dumps(table).encode(), np.uint8)) for table in tables]
    return [Array("float32", (2, 2), "numpy.ndarray", data) for data in (*damaged_bytes(array), *texts)]


@pytest.mark.parametrize("kind", some(KINDS, default=["control variates"]))
def test_damage_costs_its_client_alone(tmp_path, kind):
    federation = Federation(tmp_path, *KINDS[kind])

    def finish(*replies):
        one = Round(federation.components.federation, federation.state)
        return one.finish([Reply(client, message) for client, message in replies])

    federation.run(1)  # else each round makes the model anew
    messages = Round(federation.components.federation, federation.state).messages
    sent = {reply.metadata.src_node_id: arrived(reply) for reply in receive(federation.grid, messages, timeout=60)}
    first, bad, last = (sent[node] for node in federation.components.federation.nodes.values())
    expected, _ = finish((0, first), (2, last))
    content = dict(bad.content)
    changed = list(damages(content))
    for number, (what, damaged) in enumerate(changed):
        bad.content = RecordDict(damaged)
        if number % TRACED.get(kind, len(changed)) == 0:
            tracemalloc.start()
        state, result = finish((0, first), (1, bad), (2, last))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000, what  # 0 if nothing is traced
        tracemalloc.stop()
        assert result.dropped.keys() <= {1}, what
        if not result.dropped:
            continue
        assert result.dropped[1].isprintable(), what
        assert len(result.dropped[1].encode()) <= 500, what
        for name, model in expected.models.items():
            found = state.models[name].layers
            assert all(np.array_equal(found[layer], array) for layer, array in model.layers.items()), what
    assert len(changed) > 100
