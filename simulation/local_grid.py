"""A Flower ``Grid`` in one process: it runs the unchanged ServerApp and ClientApp without Ray and without a daemon.

A client runs when its reply is pulled, so replies stream one by one and a round of any size has one of them in memory.
It makes what Flower's runtime otherwise makes, so it needs names that Flower keeps to itself (`flwr.supercore`,
`flwr.common`, the id in a message's metadata); flwr<1.42 keeps them as they are.
"""

import logging
import shlex
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

log = logging.getLogger("fedssl")

RUN_ID, SERVER_NODE = 1, 1


class LocalGrid(Grid):
    """A federation of ``num_clients`` nodes with fixed ids, each of which holds the partition of its place."""

    def __init__(self, client_app: ClientApp, *, num_clients: int) -> None:
        self._client_app = client_app
        self._contexts = {
            SERVER_NODE + 1 + partition: Context(
                run_id=RUN_ID,
                node_id=SERVER_NODE + 1 + partition,
                node_config={"partition-id": partition, "num-partitions": num_clients},
                state=RecordDict(),
                run_config={},
            )
            for partition in range(num_clients)
        }
        self._queue: dict[str, Message] = {}
        # Flower's Message constructor asks for these.
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = RUN_ID, RUN_ID, SERVER_NODE

    def get_node_ids(self) -> Iterable[int]:
        """Ids of all nodes, in the order of their partitions."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages; nothing runs yet."""
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            self._queue[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the client of the first queued message among ``message_ids`` and return its reply."""
        wanted = set(message_ids)
        for message_id, message in self._queue.items():
            if message_id in wanted:
                del self._queue[message_id]
                return [self._answer(message)]
        return []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Yield the replies, each made when it is asked for."""
        for message_id in self.push_messages(messages):
            yield from self.pull_messages([message_id])

    def _answer(self, message: Message) -> Message:
        try:
            return self._client_app(message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:  # a client may fail in any way; the server decides what follows
            log.debug("client of node %d failed", message.metadata.dst_node_id, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)

    # --- parts of Flower's interface that one process does not use ---

    def set_run(self, run: Run) -> None:
        """There is one run."""

    @property
    def run(self) -> Run:
        """The run."""
        return Run.create_empty(run_id=RUN_ID)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Make a message; deprecated in Flower, whose messages are made by their constructor."""
        return Message(*args, **kwargs)


def run_local(overrides: Sequence[str], *, num_clients: int) -> None:
    """Run the app to its end in this process; what it raises is raised."""
    from client_app.app import app as client_app
    from server_app.app import app as server_app

    grid = LocalGrid(client_app, num_clients=num_clients)
    server_app(
        grid,
        Context(
            run_id=RUN_ID,
            node_id=SERVER_NODE,
            node_config={},
            state=RecordDict(),
            run_config={"overrides": shlex.join(overrides)},
        ),
    )
