"""The ClientApp: unpacks a `TrainPlan`, lets the resident client train, packs its `ClientUpdate`.

The same on every engine. Who it is comes from the node's own configuration: a client of a simulation, or a device,
which is whatever is not proven to be a simulation.
"""

import logging
import traceback
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from client_app.edge_client import Device, told
from client_app.limits import check_message, check_plan
from client_app.secure import answer, is_secure
from client_app.simulated import Simulated, is_simulated
from client_app.worker import resident
from fedssl.config.load import read_client
from fedssl.config.settings import EXACT
from fedssl.errors import RequestRefused
from fedssl.fingerprint import code_fingerprint
from fedssl.wire.messages import Ask, ClientUpdate, TrainPlan, node_info_reply

log = logging.getLogger("fedssl")

app = ClientApp()


@app.query("node_info")
def node_info(message: Message, context: Context) -> Message:
    """Tell who this node is."""
    try:
        return node_info_reply(message, _client(context).node_info)
    except Exception as error:  # the server is told, whatever is wrong with the node
        return _failed(message, context, error)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one round on this node's images; a failure is answered with its reason, so that the round goes on."""
    try:
        return train_round(message, context)
    except Exception as error:  # the server decides what follows from a failed client, whatever failed
        return _failed(message, context, error)


@app.train("own")
def own(message: Message, context: Context) -> Message:
    """Show the encoder that this client would use itself; it leaves no device."""
    try:
        client = _client(context)
        if isinstance(client, Device):
            raise RequestRefused("what a device uses itself stays on it")
        plan, ask = TrainPlan.from_content(message.content), Ask.from_content(message.content)
        settings = read_client(plan.settings)
        folder = settings.states / client.name
        shown = resident(settings).show(plan, client.number, folder, ask=ask, store=client.store)
        return Message(shown.to_content(replace(plan, transport=EXACT)), reply_to=message)
    except Exception as error:  # as for a failure of training
        return _failed(message, context, error)


def train_round(message: Message, context: Context) -> Message:
    """Unpack the plan, train, pack the update; or take the next step of secure aggregation."""
    if is_secure(message):
        return answer(message, context, _trained)
    client = _client(context)
    if isinstance(client, Device) and client.sums_only:
        raise RequestRefused("this device takes part in secure aggregation only (sums-only); set secure=secagg_plus")
    plan, update = _trained(message, context)
    return Message(update.to_content(plan), reply_to=message)


def _trained(message: Message, context: Context) -> tuple[TrainPlan, ClientUpdate]:
    client = _client(context)
    if isinstance(client, Device):
        check_message(message.content, client.limits)
    plan = TrainPlan.from_content(message.content)
    if plan.code != code_fingerprint():
        raise RequestRefused(f"the client runs other code ({code_fingerprint()}) than the server ({plan.code})")
    if isinstance(client, Device):
        check_plan(plan)
        settings, clock = client.settings(plan.settings), client.limits.clock()
    else:
        settings, clock = read_client(plan.settings), _no_end
    folder = settings.states / client.name
    return plan, resident(settings).train(plan, client.number, folder, store=client.store, before_step=clock)


def _client(context: Context) -> Device | Simulated:
    config = context.node_config
    return Simulated.read(config) if is_simulated(config) else Device.read(config)


def _failed(message: Message, context: Context, error: Exception) -> Message:
    place = traceback.extract_tb(error.__traceback__)[-1]
    reason = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
    if is_simulated(context.node_config):
        log.debug("the client failed", exc_info=error)
    else:
        log.error("%s", reason, exc_info=None if isinstance(error, RequestRefused) else error)
        reason = told(error)
    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)


def _no_end() -> None:
    """The user's own machine takes as long as it takes."""
