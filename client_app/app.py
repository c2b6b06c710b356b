"""The ClientApp: unpack a `TrainPlan`, train with this process's worker, pack the `ClientUpdate`.

It is the same on every engine. The node's own configuration defines its identity. A node that is not proven to be
simulated is an edge client.
"""

import functools
import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.edge_client import EdgeClient, safe_error_message
from client_app.limits import check_message, check_plan
from client_app.secure import is_secure, secagg_reply
from client_app.simulated import SimulatedClient, is_simulated
from client_app.worker import worker_for
from fedssl.compat import error_reply
from fedssl.config.load import parse_client_config
from fedssl.config.settings import LOSSLESS
from fedssl.errors import RequestRefused
from fedssl.fleet.encoders import store_encoder
from fedssl.wire.delivery import EncoderDelivery
from fedssl.wire.identity import code_fingerprint, node_info_reply
from fedssl.wire.messages import ClientUpdate, PersonalizedModelRequest, TrainPlan

log = logging.getLogger("fedssl")

app = ClientApp()


def errors_as_replies(handle: Callable[[Message, Context], Message]) -> Callable[[Message, Context], Message]:
    """Return the handler with error replies instead of exceptions, so that the round continues without the client."""

    @functools.wraps(handle)
    def handle_safely(message: Message, context: Context) -> Message:
        try:
            return handle(message, context)
        except Exception as error:  # the server needs a reply for any failure
            return _failure_reply(message, context, error)

    return handle_safely


@app.query("node_info")
@errors_as_replies
def node_info(message: Message, context: Context) -> Message:
    """Return this node's identity."""
    return node_info_reply(message, _client(context).node_info)


@app.train("personalized")
@errors_as_replies
def personalized(message: Message, context: Context) -> Message:
    """Return the personalized encoder of a simulated client. Edge clients refuse."""
    client = _client(context)
    if isinstance(client, EdgeClient):
        raise RequestRefused("what a device uses itself stays on it")
    plan = TrainPlan.from_content(message.content)
    request = PersonalizedModelRequest.from_content(message.content)
    settings = parse_client_config(plan.settings)
    folder = settings.states / client.name
    encoder = worker_for(settings).personalized_encoder(
        plan, client.number, folder, request=request, store=client.store
    )
    return Message(encoder.to_content(replace(plan, wire_dtype=LOSSLESS)), reply_to=message)


@app.train("encoder")
@errors_as_replies
def encoder(message: Message, context: Context) -> Message:
    """Store an encoder that the server delivers."""
    client = _client(context)
    if not isinstance(client, EdgeClient):
        raise RequestRefused("a simulated client stores no encoder")
    check_message(message.content, client.limits)
    store_encoder(EncoderDelivery.from_content(message.content), client.states, authority=client.authority)
    return Message(RecordDict(), reply_to=message)


@app.train()
@errors_as_replies
def train(message: Message, context: Context) -> Message:
    """Unpack the plan, train on this node's images and pack the update, or run a stage of secure aggregation."""
    if is_secure(message):
        return secagg_reply(message, context, _train)
    client = _client(context)
    if isinstance(client, EdgeClient) and client.secure_aggregation_only:
        raise RequestRefused(
            "this device takes part in secure aggregation only (secure-aggregation-only); set "
            "secure_aggregation=secagg_plus"
        )
    plan, update = _train(message, context)
    return Message(update.to_content(plan), reply_to=message)


def _train(message: Message, context: Context) -> tuple[TrainPlan, ClientUpdate]:
    client = _client(context)
    if isinstance(client, EdgeClient):
        check_message(message.content, client.limits)
    plan = TrainPlan.from_content(message.content)
    if plan.code_fingerprint != code_fingerprint():
        raise RequestRefused(
            f"the client runs other code ({code_fingerprint()}) than the server ({plan.code_fingerprint})"
        )
    if isinstance(client, EdgeClient):
        check_plan(plan)
        settings, check_deadline = client.settings(plan.settings), client.limits.make_deadline_check()
    else:
        settings, check_deadline = parse_client_config(plan.settings), lambda: None
    folder = settings.states / client.name
    return plan, worker_for(settings).train(
        plan, client.number, folder, store=client.store, on_step_start=check_deadline
    )


def _client(context: Context) -> EdgeClient | SimulatedClient:
    config = context.node_config
    return SimulatedClient.read(config) if is_simulated(config) else EdgeClient.read(config)


def _failure_reply(message: Message, context: Context, error: Exception) -> Message:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
    if is_simulated(context.node_config):
        log.debug("the client failed", exc_info=error)
    else:
        log.error("%s", reason, exc_info=None if isinstance(error, RequestRefused) else error)
        reason = safe_error_message(error)
    return error_reply(message, reason)
