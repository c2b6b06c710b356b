"""What Flower does to a message between two machines, in one process."""

from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import InflatableObject, get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedssl.flower_internals import assign_message_id, set_task_identity
from simulation.grid import LocalGrid


def objects(content: InflatableObject) -> dict[str, bytes]:
    """Everything that Flower sends of a message or a part of it, by id: one request each."""
    return {name: one.deflate() for name, one in get_all_nested_objects(content).items()}


def arrived(message: Message) -> Message:
    """The message as another machine gets it."""
    there = inflate_object_from_contents(message.object_id, objects(message))
    there.metadata.__dict__["_message_id"] = message.metadata.message_id
    return there


def message_of(content: RecordDict) -> Message:
    """A message to a client with this content."""
    set_task_identity()
    message = Message(content, 2, "train", group_id="1")
    assign_message_id(message)
    return message


class NetworkGrid(LocalGrid):
    """The local engine, whose messages go the way of those between machines; it keeps what they weigh.

    ``sent`` and ``received`` have the bytes and the number of objects of each message, in order.
    """

    def __init__(self, client_app, *, num_clients):
        super().__init__(client_app, num_clients=num_clients)
        self.sent, self.received = [], []

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        for message_id in ids:
            message = self._queue[message_id]
            if message.metadata.message_type == "train":
                self.sent.append(_weight(message))
                self._queue[message_id] = arrived(message)
        return ids

    def pull_messages(self, message_ids):
        for reply in super().pull_messages(message_ids):
            if reply.metadata.message_type != "train" or reply.has_error():
                yield reply
            else:
                self.received.append(_weight(reply))
                yield arrived(reply)


def _weight(message: Message) -> tuple[int, int]:
    parts = objects(message)
    return sum(map(len, parts.values())), len(parts)
