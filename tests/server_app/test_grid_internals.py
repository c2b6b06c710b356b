"""Messages that Flower's own grid cannot read: errors of their clients, which end no run."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.superlink.grid import http_grid

from server_app.grid_internals import answer_for_unreadable_replies
from tests.wire import message_of, objects


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    monkeypatch.setattr(http_grid, "inflate_object_from_contents", http_grid.inflate_object_from_contents)
    answer_for_unreadable_replies()


def reply():
    """A reply, and its objects as they travel."""
    arrays = ArrayRecord({"w": Array(np.arange(1000))})
    message = Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord({"x": 1})}), reply_to=message_of(RecordDict())
    )
    return message, objects(message)


def read(message, contents):
    return http_grid.inflate_object_from_contents(message.object_id, contents)


def test_a_reply_is_read():
    message, contents = reply()
    content = read(message, contents).content
    assert np.array_equal(content["arrays"]["w"].numpy(), np.arange(1000))


def change_body(content, body):
    """An object with another body."""
    kind, _, rest = content.partition(b" ")
    children, _, _ = rest.partition(b"\x00")[0].partition(b" ")
    return kind + b" " + children + b" " + str(len(body)).encode() + b"\x00" + body


BODIES = {
    "Array": [b"", b"{}", b"[" * 100_000, b'{"dtype": 3, "shape": [], "stype": "", "arraychunk_ids": [0]}'],
    "ArrayRecord": [b"", b"[]", b'{"w": 3}', b"\xff"],
    "MetricRecord": [b"\xff" * 9],
    "RecordDict": [b"", b"[]", b"{}", b'{"x": "y"}'],
}


@pytest.mark.parametrize(("kind", "body"), [(kind, body) for kind, bodies in BODIES.items() for body in bodies])
def test_a_damaged_object_is_an_error_of_its_reply(kind, body):
    message, contents = reply()
    name = next(name for name, content in contents.items() if content.startswith(kind.encode() + b" "))
    contents[name] = change_body(contents[name], body)
    found = read(message, contents)
    if found.has_error():
        assert "a reply that cannot be read" in found.error.reason
    assert found.metadata.reply_to_message_id == message.metadata.reply_to_message_id
    assert found.has_error() or kind == "RecordDict"


@pytest.mark.parametrize("content", [b"Message  1\x00\xff", b"MetricRecord  0\x00", b"\xff"])
def test_a_damaged_message_is_an_error_without_a_client(content):
    message, contents = reply()
    contents[message.object_id] = content
    found = read(message, contents)
    assert found.has_error()
    assert found.metadata.reply_to_message_id == ""


def test_a_chunk_is_not_repeated_without_end():
    message, contents = reply()
    name = next(name for name, content in contents.items() if content.startswith(b"Array "))
    array = {"dtype": "int64", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 10_000_000}
    contents[name] = change_body(contents[name], json.dumps(array).encode())
    assert "more than half of the available memory" in read(message, contents).error.reason  # 80 gigabytes
