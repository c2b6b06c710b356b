"""Undocumented names of Flower 1.41 for simulations and error replies.

`client_app.compat`, `server_app.compat` and `simulation.compat` contain the names whose import is slow.
"""

import uuid

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["RUN_ID", "SERVER_NODE", "Run", "assign_message_id", "error_reply", "set_task_identity"]

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
