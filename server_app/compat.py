"""Undocumented names of Flower 1.41: the server side of SecAgg+."""

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import FitIns, Parameters, parameters_to_ndarrays
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState

__all__ = ["SecAggPlusWorkflow", "WorkflowState", "empty_instructions", "parameters_to_ndarrays", "workflow_records"]


def workflow_records(round: int) -> RecordDict:
    """Return the state that the workflow expects in its context."""
    return RecordDict(
        {MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: round}), MAIN_PARAMS_RECORD: ArrayRecord()}
    )


def empty_instructions() -> FitIns:
    """Return instructions without parameters. The plan is sent separately."""
    return FitIns(Parameters([], ""), {})
