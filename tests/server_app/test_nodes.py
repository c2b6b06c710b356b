"""Nodes are waited for as long as they may take, with a line that says so; what is wrong with them is one sentence."""

import time

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedssl.errors import InputError
from fedssl.flower_internals import assign_message_id
from server_app import console, nodes
from server_app.nodes import discover_clients
from simulation.grid import SimulatedGrid


class SlowGrid(SimulatedGrid):
    """Nodes that are there after some seconds and answer after more; some never, or with an error."""

    partition_nodes = None  # as in Flower's own simulation, the server has to ask

    def __init__(
        self,
        *,
        size=3,
        there_after=0.0,
        answers_after=0.0,
        silent=(),
        error=None,
        partition=lambda node: node,
        devices=(),
    ):
        super().__init__(num_clients=size)
        self._begun = time.monotonic()
        self._there_after, self._answers_after = there_after, answers_after
        self._silent, self._error, self._partition, self._devices = silent, error, partition, devices
        self._asked = {}

    def get_node_ids(self):
        return super().get_node_ids() if time.monotonic() - self._begun >= self._there_after else []

    def push_messages(self, messages):
        self._begun_to_ask = time.monotonic()
        new = {assign_message_id(message): message for message in messages}
        self._asked |= new
        return list(new)

    def pull_messages(self, message_ids):
        if time.monotonic() - self._begun_to_ask < self._answers_after:
            return []
        wanted = [self._asked.pop(each) for each in list(message_ids) if each in self._asked]
        return [self._answer(message) for message in wanted if message.metadata.dst_node_id - 2 not in self._silent][
            ::-1
        ]

    def _answer(self, message):
        if self._error:
            return Message(Error(code=0, reason=self._error), reply_to=message)
        node = message.metadata.dst_node_id - 2
        if node in self._devices:
            return Message(
                RecordDict({"node-info": ConfigRecord({"name": f"d{node}", "problem": ""})}), reply_to=message
            )
        held = {"partition-id": self._partition(node), "num-partitions": self.num_clients}
        return Message(RecordDict({"metrics": MetricRecord(held)}), reply_to=message)


def test_late_nodes_and_answers_are_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(console, "WAITING_INTERVAL", 0.1)
    grid = SlowGrid(there_after=0.35, answers_after=0.35)
    assert discover_clients(grid, 3, timeout=60).nodes == {0: 2, 1: 3, 2: 4}
    assert "fewer SuperNodes than clients yet (waiting for" in caplog.text
    assert "their processes are still starting (waiting for" in caplog.text


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"silent": {1}}, r"1 of 3 SuperNodes, such as 3, did not reply within 0 s.* longer reply_timeout"),
        ({"error": "no torch"}, r"a client cannot start: no torch"),
        ({"partition": lambda node: node // 2}, r"have the partitions \[0, 1\] but 0 to 2 are needed, each once"),
        (
            {"devices": {0}},
            r"1 nodes are devices and 2 are simulated clients, such as node 3; run either with devices or in",
        ),
        ({"size": 2}, r"num_clients=3 but the federation has 2 SuperNodes"),
        ({"there_after": 1000}, r"^no SuperNode has connected within 0 s; start the SuperNodes .fedssl-fleet list"),
        *(
            (
                {"size": size, "silent": range(3)},
                f"^none of {size} SuperNodes replied within 0 s; check their processes",
            )
            for size in (2, 3)
        ),
    ],
)
def test_what_is_wrong_with_the_nodes(grid, message, monkeypatch):
    monkeypatch.setattr(nodes, "DISCOVERY_GRACE_SECONDS", 0.1)
    with pytest.raises(InputError, match=message):
        discover_clients(SlowGrid(**grid), 3, timeout=0.2)


def test_a_node_among_devices_that_is_none_takes_no_part(caplog):
    found = discover_clients(SlowGrid(devices={0, 2}), 3, timeout=60)
    assert (found.client_ids, found.rejected) == ({"d0": 0, "d2": 1}, {3: "is not a device"})
