"""A task of a process of engine ``ray``: which clients it runs, in this process."""

import math

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from simulation import client_actor
from simulation.client_actor import ClientActor, ClientCall, Payload
from simulation.grid import NodeContexts

CLIENTS = 5


@pytest.fixture(autouse=True)
def unlimited_seconds(monkeypatch):
    monkeypatch.setattr(client_actor, "TASK_SECONDS", math.inf)


def make_calls(payloads=1):
    """Return calls of `CLIENTS` nodes; call k has payload k modulo ``payloads``."""
    contexts = NodeContexts(num_clients=CLIENTS)
    return [
        ClientCall(Message(RecordDict(), node, "train"), contexts[node], node % payloads, None)
        for node in range(2, 2 + CLIENTS)
    ]


def make_payload(value):
    return Payload(RecordDict({"arrays": ArrayRecord([np.full(1000, value, np.float32)])}), None)


def adding_actor(*, failing=None):
    """Return an actor whose clients add their partition id to the array, and count their calls."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        client = context.node_config["partition-id"]
        if client == failing:
            raise ValueError("no camera")
        context.state["calls"] = MetricRecord({"n": 1})
        (array,) = message.content.array_records["arrays"].values()
        return Message(RecordDict({"arrays": ArrayRecord([array.numpy() + client])}), reply_to=message)

    return ClientActor(app)


def first_numbers(replies):
    return [next(iter(reply.message.content.array_records["arrays"].values())).numpy()[0] for reply in replies]


def test_a_task_runs_its_clients_in_order_with_their_payloads():
    replies, seconds = adding_actor().run_clients(make_calls(payloads=2), make_payload(0), make_payload(100))
    # Nodes 2 to 6 are clients 0 to 4. Those of even nodes have payload 0.
    assert first_numbers(replies) == [0, 101, 2, 103, 4]
    assert [reply.message.metadata.src_node_id for reply in replies] == [2, 3, 4, 5, 6]
    assert [reply.context.state["calls"]["n"] for reply in replies] == [1] * CLIENTS
    assert all(reply.summed is None for reply in replies)
    assert seconds > 0


def test_a_task_stops_after_a_failed_client():
    replies, _ = adding_actor(failing=2).run_clients(make_calls(), make_payload(0))
    assert [reply.message.has_error() for reply in replies] == [False, False, True]
    assert replies[-1].message.error.reason == "ValueError: no camera"


@pytest.mark.parametrize(("clients", "num_bytes"), [(1, 3000), (2, 5000), (CLIENTS, 40_000)])
def test_a_task_stops_when_its_replies_are_large(monkeypatch, clients, num_bytes):
    """A reply has 4,000 bytes and its envelope, less than 500 bytes: two have 8,000 to 9,000."""
    monkeypatch.setattr(client_actor, "TASK_BYTES", num_bytes)
    assert len(adding_actor().run_clients(make_calls(), make_payload(0))[0]) == clients


def test_a_task_stops_after_some_seconds(monkeypatch):
    """The clock is read at the start and after each client: 0.0, 0.2, 0.4, which is above 0.3."""
    monkeypatch.setattr(client_actor, "TASK_SECONDS", 0.3)
    times = iter(np.arange(0.0, 2.0, 0.2))
    monkeypatch.setattr(client_actor.time, "perf_counter", lambda: float(next(times)))
    replies, seconds = adding_actor().run_clients(make_calls(), make_payload(0))
    assert (len(replies), seconds) == (2, 0.4)
