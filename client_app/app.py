"""The ClientApp: unpacks a `TrainPlan`, lets the resident client train, packs its `ClientUpdate`.

The same on every engine. Which client this is comes from the node's own configuration: ``partition-id`` and
``num-partitions``; ``state-path`` may name the folder for what the client keeps between rounds.
"""

import logging
import traceback
from pathlib import Path

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from client_app.resident import resident
from fedssl.fingerprint import code_fingerprint
from fedssl.messages import TrainPlan, who_reply

log = logging.getLogger("fedssl")

app = ClientApp()


@app.query("who")
def who(message: Message, context: Context) -> Message:
    """Tell which partition this node holds."""
    return who_reply(message, int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one round on this node's partition; a failure is answered with its reason, so that the round goes on."""
    try:
        return train_round(message, context)
    except Exception as error:  # the server decides what follows from a failed client, whatever failed
        log.debug("training failed", exc_info=True)
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
        return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)


def train_round(message: Message, context: Context) -> Message:
    """Unpack the plan, train, pack the update."""
    plan = TrainPlan.from_content(message.content)
    if plan.code != code_fingerprint():
        raise RuntimeError(f"the client runs other code ({code_fingerprint()}) than the server ({plan.code})")
    client = resident(plan.settings)
    partition_id = int(context.node_config["partition-id"])
    states = client.settings.folder / "clients"
    if "state-path" in context.node_config:
        states = Path(str(context.node_config["state-path"])) / client.settings.run_id
    update = client.train(plan, partition_id, states / str(partition_id))
    return Message(update.to_content(plan), reply_to=message)
