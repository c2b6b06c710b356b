"""Layers in Flower's records: what is handed over, what a network makes of it, and what it weighs."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, RecordDict

from fedssl.config.constraint_table import WIRE_DTYPES
from fedssl.config.load import compose
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_layers
from fedssl.wire.messages import ClientUpdate, TrainPlan, plan_codec
from fedssl.wire.records import EXACT, Codec, arrays_to_record, content_bytes, record_bytes
from fedssl.wire.wire_format import TABLE
from tests.arrays import same_bits
from tests.cases import some
from tests.wire import arrived, message_of, objects

LAYERS = {
    "encoder.conv.weight": np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 2, 2, 2),
    "encoder.bn.running_var": np.ones(3, dtype=np.float32),
    "encoder.bn.num_batches_tracked": np.array(7, dtype=np.int64),
}
CENTROIDS = {"centroids": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)}
SENT = {"metrics": ("num-examples",), "oldest_resumable_round": 2, "code_fingerprint": "0123456789abcdef"}
PLAN = TrainPlan(round=3, layers=LAYERS, settings="seed: 0\n" * 40, **SENT)


def test_layers_are_handed_over_unpacked_in_one_process():
    record = EXACT.encode(LAYERS)
    assert np.shares_memory(EXACT.decode(record)["encoder.conv.weight"], LAYERS["encoder.conv.weight"])
    content_bytes(RecordDict({"arrays": record}))
    assert "_packed" not in record.__dict__


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_a_network_brings_what_one_process_hands_over(wire_dtype):
    start = {name: array for name, array in LAYERS.items() if name != "encoder.bn.running_var"}
    plan = replace(PLAN, broadcast=CENTROIDS, layers=start)
    update = ClientUpdate(layers=LAYERS, uploaded_parts=CENTROIDS, partition_id=4, num_examples=9)
    codec = Codec(wire_dtype)
    down, up = message_of(plan.to_content(codec)), message_of(update.to_content(plan, codec))
    here, there = TrainPlan.from_content(down.content), TrainPlan.from_content(arrived(down).content)
    assert same_bits(here.layers, there.layers)
    assert same_bits(there.broadcast, CENTROIDS)  # what a method's server side deals with is not shortened
    assert plan_codec(arrived(down).content) == codec
    here, there = (ClientUpdate.from_content(one.content, 4, codec, start=start) for one in (up, arrived(up)))
    assert same_bits(here.layers, there.layers)
    assert same_bits(there.uploaded_parts, CENTROIDS)
    if wire_dtype == "fp32":
        assert same_bits(there.layers, LAYERS)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_a_model_of_many_layers_travels_as_few_arrays(wire_dtype):
    layers = {f"encoder.{number}.weight": np.full((2, 2), number, dtype=np.float32) for number in range(100)}
    layers |= {f"encoder.{number}.num_batches_tracked": np.array(number) for number in range(20)}
    message = message_of(replace(PLAN, layers=layers).to_content(Codec(wire_dtype)))
    there = arrived(message).content["arrays"]
    assert TABLE in there
    assert len(there) == (4 if wire_dtype == "int8" else 3)
    # The message, its records (plan, arrays, and shared, which is empty), and of every array one chunk.
    assert len(objects(message)) == 1 + 1 + 3 + 2 * len(there)


MODELS = {"digits": ["encoder.width=4"], "resnet18": ["encoder=resnet18"]}
MODELS["vit"] = ["encoder=vit_tiny", "encoder.patch=4"]


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("name", some(MODELS, default=["digits"]))
def test_the_bytes_that_are_counted_are_those_that_flower_sends(name, wire_dtype):
    layers = exchanged_layers(build_method(compose(MODELS[name]).model))
    start = {name: array * np.array(0.5, dtype=array.dtype) for name, array in layers.items()}
    plan = replace(PLAN, layers=start, broadcast=CENTROIDS)
    update = ClientUpdate(layers=layers, partition_id=0, num_examples=7).to_content(plan, Codec(wire_dtype))
    for content in (plan.to_content(Codec(wire_dtype)), update):
        message = message_of(content)
        sent = sum(map(len, objects(message).values()))
        assert content_bytes(content) == pytest.approx(sent, rel=0.01)
        assert content_bytes(arrived(message).content) == content_bytes(content)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_a_record_has_exactly_the_bytes_of_its_objects(wire_dtype):
    record = arrived(message_of(PLAN.to_content(Codec(wire_dtype)))).content.array_records["arrays"]
    assert record_bytes(record) == sum(map(len, objects(record).values()))


def test_one_array_per_layer_is_read_from_flower_peers():
    stock = ArrayRecord(dict(arrays_to_record(LAYERS)))
    assert same_bits(EXACT.decode(stock), LAYERS)
    with pytest.raises(ValueError, match="the table of layers is missing"):
        Codec("int8").decode(stock)
