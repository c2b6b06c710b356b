"""Replies in order of the clients, whatever their order of arrival."""

from types import SimpleNamespace

import pytest
from flwr.app import Message, RecordDict

from fedssl.flower_internals import assign_message_id, error_reply, set_task_identity
from server_app.exchanges.base import NO_REPLY, Lost, in_client_order

NODES = {10: 3, 11: 0, 12: 2, 13: 1}  # client ids by node


def received(order, *, failed=(), is_lost=lambda client: True):
    """Return clients, with reasons if they are lost, of a round in which nodes reply in this order."""
    set_task_identity()
    messages = {node: Message(RecordDict(), dst_node_id=node, message_type="train") for node in NODES}
    for message in messages.values():
        assign_message_id(message)
    replies = [
        error_reply(messages[node], "why") if node in failed else Message(RecordDict(), reply_to=messages[node])
        for node in order
    ]
    sent = SimpleNamespace(nodes=NODES, messages=[*messages.values()])
    found = in_client_order(iter(replies), sent, is_lost=is_lost)
    return [(one.client, one.reason) if isinstance(one, Lost) else one.client for one in found]


@pytest.mark.parametrize("order", [(10, 11, 12, 13), (13, 12, 11, 10), (12, 10, 13, 11)])
def test_replies_are_in_order_of_the_clients(order):
    assert received(order) == [0, 1, 2, 3]


def test_failed_and_missing_clients_are_lost_once():
    assert received((12, 10), failed={12}) == [(2, "it failed: why"), (0, NO_REPLY), (1, NO_REPLY), 3]
    assert received((12, 10), failed={12}, is_lost=lambda client: client == 1) == [
        (2, "it failed: why"),
        (1, NO_REPLY),
        3,
    ]
    assert received((11, 13, 12, 10), failed={12}) == [0, 1, (2, "it failed: why"), 3]


def test_a_second_reply_is_ignored(caplog):
    assert received((11, 11, 13, 12, 10, 12)) == [0, 1, 2, 3]
    assert caplog.text.count("an unexpected reply of node") == 2
