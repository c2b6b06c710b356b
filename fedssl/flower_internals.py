"""Undocumented names of Flower 1.41 for simulations, messages as bytes and error replies.

Other modules with such names are called ``..._internals`` as well.
"""

import uuid

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.run import Run as Run
from flwr.supercore.task_identity import TaskIdentity

RUN_ID, SERVER_NODE = 1, 1  # of a simulation


def error_reply(message: Message, reason: str) -> Message:
    """Return the reply of a client that failed."""
    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)


def set_task_identity() -> None:
    """Set the run and the node of this process, a simulation, which Flower's messages contain."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = RUN_ID, RUN_ID, SERVER_NODE


def assign_message_id(message: Message) -> str:
    """Assign a unique id to a message, and return it."""
    message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
    return message.metadata.message_id


def content_to_bytes(content: RecordDict) -> bytes:
    """Serialize the content of a message."""
    data: bytes = recorddict_to_proto(content).SerializeToString()
    return data


def content_from_bytes(data: bytes | bytearray) -> RecordDict:
    """Return the content of a message from `content_to_bytes`."""
    return recorddict_from_proto(ProtoRecordDict.FromString(data))


def drop_content(message: Message) -> None:
    """Empty a message, whose metadata are enough for a reply, so that its model does not stay in memory."""
    if message.has_content():
        message.content = RecordDict()


def message_to_bytes(message: Message) -> bytes:
    """Serialize a message with its metadata, and empty it: a model would be in memory once more."""
    proto = message_to_proto(message)
    drop_content(message)
    data: bytes = proto.SerializeToString()
    return data


def message_from_bytes(data: bytes | bytearray) -> Message:
    """Return the message from `message_to_bytes`."""
    proto = ProtoMessage.FromString(data)
    del data  # if the caller has no other reference, a model is in memory once less
    return message_from_proto(proto)


def context_to_bytes(context: Context) -> bytes:
    """Serialize the context of a node."""
    data: bytes = context_to_proto(context).SerializeToString()
    return data


def context_from_bytes(data: bytes | bytearray) -> Context:
    """Return the context from `context_to_bytes`."""
    return context_from_proto(ProtoContext.FromString(data))
