"""Undocumented names of Flower 1.41 for simulations, error replies and the server side of SecAgg+.

`client_app.compat` and `fedssl.fleet.compat` contain the names that only they need.
"""

import uuid

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common import FitIns, Parameters, parameters_to_ndarrays
from flwr.common.constant import ErrorCode
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "RUN_ID",
    "SERVER_NODE",
    "Run",
    "SecAggPlusWorkflow",
    "WorkflowState",
    "assign_message_id",
    "content_from_bytes",
    "content_to_bytes",
    "empty_instructions",
    "error_reply",
    "parameters_to_ndarrays",
    "set_task_identity",
    "workflow_records",
]

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


def content_from_bytes(data: bytes) -> RecordDict:
    """Return the content of a message from `content_to_bytes`."""
    return recorddict_from_proto(ProtoRecordDict.FromString(data))


def workflow_records(round: int) -> RecordDict:
    """Return the state that the workflow expects in its context."""
    return RecordDict(
        {MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: round}), MAIN_PARAMS_RECORD: ArrayRecord()}
    )


def empty_instructions() -> FitIns:
    """Return instructions without parameters. The plan is sent separately."""
    return FitIns(Parameters([], ""), {})
