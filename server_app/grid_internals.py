"""Undocumented names of Flower 1.41 for replies that the grid of a deployment cannot read."""

import json
from collections.abc import Mapping
from contextlib import suppress

from flwr.app import Array, Message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_type_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedssl.machine.memory import available_memory
from fedssl.safe_io import sanitize_line


def answer_for_unreadable_replies() -> None:
    """Let Flower's grid return an error instead of a reply that it cannot read, which would end the run.

    The SuperLink has all objects of a message, into which a client may have put anything.
    """
    from flwr.superlink.grid import http_grid  # here: only the server of a deployment needs it

    def read(message_id: str, contents: dict[str, bytes]) -> Message:
        content = contents[message_id]
        try:
            check_inflated_size(contents)
            message = inflate_object_from_contents(message_id, contents)
            assert isinstance(message, Message)
            return message
        except Exception as error:  # whatever a peer may have put into a message
            proto = ProtoMessage()
            with suppress(Exception):  # otherwise it is unknown to which message it replies
                proto = ProtoMessage.FromString(get_object_body(content, Message))
            proto.ClearField("content")
            proto.metadata.message_type = SYSTEM_MESSAGE_TYPE  # as of Flower's own errors
            proto.error.code = ErrorCode.MESSAGE_UNAVAILABLE
            proto.error.reason = sanitize_line(f"a reply that cannot be read ({type(error).__name__}: {error})")
            return message_from_proto(proto)

    vars(http_grid)["inflate_object_from_contents"] = read


def check_inflated_size(contents: Mapping[str, bytes]) -> None:
    """Raise `ValueError` if the arrays of a message exceed half of the available memory.

    An array may name a chunk any number of times, so that a small message becomes a large one.
    """
    total, limit = 0, available_memory()
    for content in contents.values():
        if get_object_type_from_object_content(content) == Array.__qualname__:
            chunks = get_object_children_ids_from_object_content(content)
            named = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            total += sum(len(contents[chunks[index]]) for index in named)
    if limit is not None and total > limit // 2:
        raise ValueError(f"its arrays have {total:,} bytes, more than half of the available memory")
