"""Undocumented names of Flower 1.41: the client side of SecAgg+."""

import numpy as np
from flwr.app import Message
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

__all__ = ["delta_reply", "secaggplus_mod"]


def delta_reply(message: Message, delta: np.ndarray) -> Message:
    """Return the reply that Flower's mod expects: the delta of one client as a `FitRes`."""
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([delta]), num_examples=1, metrics={})
    return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)
