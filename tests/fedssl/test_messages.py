import pickle
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedssl.messages import (
    Array,
    ClientUpdate,
    TrainPlan,
    Who,
    content_bytes,
    from_record,
    read_who,
    to_record,
    who_reply,
)

LAYERS = {
    "encoder.conv.weight": np.arange(12, dtype=np.float32).reshape(3, 2, 2),
    "encoder.bn.num_batches_tracked": np.array(7, dtype=np.int64),
}
PLAN = TrainPlan(
    round=3, layers=LAYERS, settings="seed: 0\n", metrics=("num-examples",), keep_from=2, code="0123456789abcdef"
)
CENTROIDS = {"centroids": np.eye(3, dtype=np.float32)}


def same(one, other):
    return list(one) == list(other) and all(
        np.array_equal(one[k], other[k]) and one[k].dtype == other[k].dtype and one[k].shape == other[k].shape
        for k in one
    )


def test_layers_are_handed_over_without_a_copy():
    received = from_record(to_record(LAYERS))
    assert same(received, LAYERS)
    assert np.shares_memory(received["encoder.conv.weight"], LAYERS["encoder.conv.weight"])


def test_pickle_takes_the_memory_out_of_band():
    buffers = []
    data = pickle.dumps(to_record(LAYERS), protocol=5, buffer_callback=buffers.append)
    sizes = sorted(memoryview(buffer).nbytes for buffer in buffers)
    assert 48 in sizes  # 12 float32
    assert same(from_record(pickle.loads(data, buffers=buffers)), LAYERS)


def test_a_stock_flower_peer_reads_the_bytes():
    array = Array(LAYERS["encoder.conv.weight"])
    stock = FlowerArray(array.dtype, array.shape, array.stype, array.data)
    assert np.array_equal(stock.numpy(), LAYERS["encoder.conv.weight"])
    assert array.deflate() == stock.deflate()
    assert array.object_id == stock.object_id


def test_we_read_what_a_stock_flower_peer_writes():
    record = ArrayRecord({name: FlowerArray(array) for name, array in LAYERS.items()})
    assert same(from_record(record), LAYERS)


def test_plan_survives_the_message():
    back = TrainPlan.from_content(PLAN.to_content())
    assert same(back.layers, PLAN.layers)
    assert (back.round, back.settings, back.metrics, back.keep_from, back.code) == (
        *(3, "seed: 0\n", ("num-examples",), 2, "0123456789abcdef"),
    )


@pytest.mark.parametrize("up", [None, (), ("encoder.conv.weight",)])
def test_all_and_nothing_are_told_apart(up):
    assert TrainPlan.from_content(replace(PLAN, up=up).to_content()).up == up


def test_what_belongs_to_the_servers_half_of_a_method_is_apart_from_the_layers():
    plan = TrainPlan.from_content(replace(PLAN, shared=CENTROIDS).to_content())
    assert same(plan.shared, CENTROIDS)
    assert same(plan.layers, LAYERS)
    update = ClientUpdate(layers=LAYERS, gathered=CENTROIDS, partition_id=4)
    back = ClientUpdate.from_content(update.to_content(()), 4)
    assert same(back.gathered, CENTROIDS)
    assert same(back.layers, LAYERS)
    assert content_bytes(update.to_content(()), update.layers, update.gathered) == 12 * 4 + 8 + 9 * 4


@pytest.mark.parametrize("metrics", [(), ("seconds",), ("num-examples", "train-loss", "seconds")])
def test_update_carries_only_the_declared_metrics(metrics):
    update = ClientUpdate(layers=LAYERS, partition_id=4, num_examples=10, train_loss=0.5, seconds=1.5)
    content = update.to_content(metrics)
    assert set(content.metric_records["metrics"]) == set(metrics)
    assert set(content) == {"arrays", "gathered", "metrics"}
    back = ClientUpdate.from_content(content, 4)
    assert back.num_examples == (10 if "num-examples" in metrics else None)
    assert back.train_loss == (0.5 if "train-loss" in metrics else None)


def test_bytes_of_a_message():
    # 12 float32 values and one int64 counter; the update without metrics has nothing else.
    update = ClientUpdate(layers=LAYERS, partition_id=0)
    assert content_bytes(update.to_content(()), update.layers) == 12 * 4 + 8
    assert content_bytes(update.to_content(()), update.layers) < content_bytes(PLAN.to_content(), PLAN.layers)


def test_who_query():
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    query = Message(RecordDict(), 2, "query.who")
    for who in (Who(partition=3, partitions=10), Who(partition=None, name="roof"), Who(partition=0, name="garden-2")):
        assert read_who(who_reply(query, who)) == who
