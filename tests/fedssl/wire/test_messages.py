import tracemalloc
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st

from fedssl.wire.identity import NODE_INFO, NodeInfo, node_info_reply, read_node_info
from fedssl.wire.messages import ClientUpdate, TrainPlan, with_last_used_round
from fedssl.wire.records import Array, arrays_to_record, content_bytes, read_array, record_to_arrays
from tests.arrays import archive, npy, same

KERNEL = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
LAYERS = {"encoder.conv.weight": KERNEL, "encoder.bn.num_batches_tracked": np.array(7, dtype=np.int64)}
SENT = {"metrics": ("num-examples",), "oldest_resumable_round": 2, "code_fingerprint": "0123456789abcdef"}
PLAN = TrainPlan(round=3, layers=LAYERS, settings="seed: 0\n", **SENT)
CENTROIDS = {"centroids": np.eye(3, dtype=np.float32)}


def test_layers_are_handed_over_without_a_copy():
    received = record_to_arrays(arrays_to_record(LAYERS))
    assert same(received, LAYERS)
    assert np.shares_memory(received["encoder.conv.weight"], LAYERS["encoder.conv.weight"])


def test_a_stock_flower_peer_reads_the_bytes():
    array = Array(LAYERS["encoder.conv.weight"])
    stock = FlowerArray(array.dtype, array.shape, array.stype, array.data)
    assert np.array_equal(stock.numpy(), LAYERS["encoder.conv.weight"])
    assert array.deflate() == stock.deflate()
    assert array.object_id == stock.object_id


def test_we_read_what_a_stock_flower_peer_writes():
    record = ArrayRecord({name: FlowerArray(array) for name, array in LAYERS.items()})
    assert same(record_to_arrays(record), LAYERS)


def test_plan_survives_the_message():
    back = TrainPlan.from_content(PLAN.to_content())
    assert same(back.layers, PLAN.layers)
    assert (back.round, back.settings, back.metrics, back.oldest_resumable_round, back.code_fingerprint) == (
        *(3, "seed: 0\n", ("num-examples",), 2, "0123456789abcdef"),
    )


def test_contents_of_clients_differ_in_their_last_used_round():
    shared = PLAN.to_content()
    own = with_last_used_round(shared, 2)
    assert TrainPlan.from_content(own).last_used_round == 2
    assert TrainPlan.from_content(shared).last_used_round is None
    assert all(own[name] is record for name, record in shared.items() if name != "config")
    assert dict(own) | {"config": None} == dict(replace(PLAN, last_used_round=2).to_content()) | {"config": None}
    assert own["config"] == replace(PLAN, last_used_round=2).to_content()["config"]


def test_parts_of_a_methods_server_side_are_apart():
    plan = TrainPlan.from_content(replace(PLAN, broadcast=CENTROIDS).to_content())
    assert same(plan.broadcast, CENTROIDS)
    assert same(plan.layers, LAYERS)
    update = ClientUpdate(layers=LAYERS, uploaded_parts=CENTROIDS, partition_id=4)
    back = ClientUpdate.from_content(update.to_content(PLAN), 4)
    assert same(back.uploaded_parts, CENTROIDS)
    assert same(back.layers, LAYERS)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        np.arange(24, dtype=np.float16).reshape(2, 3, 4).transpose(2, 0, 1),
        np.array(7, dtype=np.int64),
        np.zeros((0, 3), dtype=bool),
    ],
)
def test_arrays_are_read_where_they_lie(array):
    data = Array(array).data
    back = read_array(data, name="w")
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    assert not back.size or np.may_share_memory(back, np.frombuffer(data, np.uint8))
    assert not back.flags.writeable


ONE = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (archive(np.zeros(3)), "array w is not in NumPy's format"),  # an archive, which numpy.load takes
        (b"", "array w is not in NumPy's format"),
        (b"\x93NUMPY\x01\x00\xff\xff{" + b"(" * 70000, "array w is not in NumPy's format"),
        (b"\x93NUMPY\x09\x00" + npy(ONE)[8:], "array w is not in NumPy's format"),
        (npy(ONE)[:-1], r"array w has 15 bytes, but 16 by its shape \(4,\)"),
        (npy(ONE) + b"x", r"array w has 17 bytes, but 16 by its shape \(4,\)"),
        (npy(ONE, shape=(10**12,)), "array w has 16 bytes, but 4000000000000 by its shape"),
        (npy(ONE[:0], shape=(0, 10**30)), r"array w has float32 of shape \(0, 10+\) instead of numbers"),
        (npy(ONE, shape=(-2, -2)), r"array w has float32 of shape \(-2, -2\) instead of numbers"),
        (npy(ONE, descr="|O"), "array w has object"),
        (npy(ONE, descr="<c8"), "array w has complex64"),
        (npy(ONE, descr="|S4"), "instead of numbers"),
        (npy(ONE, descr=[("a", "<f4")]), "instead of numbers"),
    ],
)
def test_bytes_without_an_array_are_refused_before_allocation(data, reason):
    tracemalloc.start()
    with pytest.raises(ValueError, match=reason):
        read_array(data, name="w")
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_give_an_array_or_a_sentence(noise, start):
    data = npy(ONE)
    for mixed in (noise, data[:start] + noise + data[start + len(noise) :]):
        with suppress(ValueError):
            array = read_array(mixed, name="w")
            assert array.nbytes < len(mixed)


@pytest.mark.parametrize(
    ("name", "record", "reason"),
    [
        ("extra", ConfigRecord({"a": 1}), "unexpected record extra"),
        ("metrics", MetricRecord({"images": 3}), "unexpected metric images"),
        (
            "metrics",
            MetricRecord({"num-examples": 2.0**53}),
            "metric num-examples is 9007199254740992.0, which is not a",
        ),
        ("reply-config", ConfigRecord({"round": "one", "code-fingerprint": "x"}), "one instead of a number"),
    ],
)
def test_what_nobody_asked_for_is_refused(name, record, reason):
    content = ClientUpdate(layers=LAYERS, partition_id=4).to_content(PLAN)
    content[name] = record
    with pytest.raises(ValueError, match=reason):
        ClientUpdate.from_content(content, 4)


def test_who_query():
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    query = Message(RecordDict(), 2, "query.node_info")
    for who in (
        NodeInfo(partition=3, partitions=10),
        NodeInfo(partition=None, name="roof"),
        NodeInfo(partition=0, name="garden-2"),
        NodeInfo(partition=None, name="roof", base_digests=("a" * 64, "0" * 64)),
        NodeInfo(partition=None, name="roof", max_rank=4),
    ):
        assert read_node_info(node_info_reply(query, who)) == who


@pytest.mark.parametrize("digests", [["a" * 63], ["../x"], [3], ["a" * 64] * 65, "a" * 64])
def test_invalid_digests_of_a_node_are_refused(digests):
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    reply = node_info_reply(Message(RecordDict(), 2, "query.node_info"), NodeInfo(partition=None, name="roof"))
    reply.content.config_records[NODE_INFO]["base-digests"] = digests
    with pytest.raises(ValueError, match="base layers"):
        read_node_info(reply)


def test_plans_say_when_nothing_is_reported_or_sent():
    for up in (None, (), ("encoder.weight",)):
        plan = replace(PLAN, layers={}, metrics=(), upload_names=up)
        content = plan.to_content()
        assert content_bytes(content) > 0
        assert TrainPlan.from_content(content) == plan
