"""The handlers of the ClientApp: unpack a `TrainPlan`, train with this process's worker, pack the `ClientUpdate`.

They are the same on every engine. The node's own configuration defines its identity. A node that is not proven to be
simulated is an edge client.
"""

import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict

from client_app.edge_client import EdgeClient, safe_error_message
from client_app.limit_checks import check_message, check_plan
from client_app.memory_retry import run_with_retry
from client_app.simulated import MARKER_KEY, SimulationMarker, is_simulated
from client_app.state_store import FILE_STORE, StateStore
from client_app.worker import ClientWorker, release_worker, worker_for
from fedssl.config.load import parse_client_config, parse_client_images
from fedssl.config.settings import ClientSettings
from fedssl.datasets.base import forget_images, load_federated
from fedssl.datasets.cache import delete_other_caches
from fedssl.errors import InputError, RequestRefused
from fedssl.fleet.encoders import encoder_quality, store_encoder
from fedssl.fleet.history import record
from fedssl.flower_internals import error_reply
from fedssl.logs import log
from fedssl.machine.out_of_memory import OUT_OF_MEMORY, is_out_of_memory
from fedssl.partition import client_indices, shifted
from fedssl.runs.manifest import STATE_SUFFIX, client_folder, remove_versions_after
from fedssl.safe_io import sanitize_line
from fedssl.secure_aggregation.client import is_secure, secagg_reply
from fedssl.secure_aggregation.protocol import SECAGG_CONFIG_KEY
from fedssl.seeding import python_seed
from fedssl.statistics.exchange import QUERY, answer
from fedssl.wire.delivery import EncoderDelivery, quality_content
from fedssl.wire.device import code_fingerprint
from fedssl.wire.identity import NodeInfo, node_info_reply
from fedssl.wire.messages import ClientUpdate, PersonalizedModelRequest, TrainPlan, plan_codec
from fedssl.wire.records import content_bytes
from strategies.mods.ranks import received_rank


@dataclass(frozen=True)
class SimulatedClient:
    """A simulated client."""

    number: int  # partition id
    partitions: int
    store: StateStore = FILE_STORE
    engine_retries: bool = False  # see `client_app.simulated.SimulationMarker`

    @classmethod
    def read(cls, node_config: Mapping[str, Any]) -> "SimulatedClient":
        marker = node_config.get(MARKER_KEY, SimulationMarker())  # Flower's own runtime sets none
        return cls(
            int(node_config["partition-id"]),
            int(node_config["num-partitions"]),
            marker.store or FILE_STORE,
            marker.engine_retries,
        )

    def state_folder(self, states: Path) -> Path:
        return client_folder(states, self.number)

    @property
    def node_info(self) -> NodeInfo:
        return NodeInfo(partition=self.number, partitions=self.partitions)


Client = EdgeClient | SimulatedClient
StepHook = Callable[[], None]


@python_seed(None)
def handle(message: Message, context: Context, *, on_step_start: StepHook = lambda: None) -> Message:
    """Return the reply to a message. An error becomes an error reply, so that the round continues without the client.

    An edge client calls ``on_step_start`` before every training step. An exception that it raises ends the training.
    """
    try:
        config, (category, _, action) = context.node_config, message.metadata.message_type.partition(".")
        client = SimulatedClient.read(config) if is_simulated(config) else EdgeClient.read(config)
        if action == QUERY:
            summarize = partial(_statistics, message, client, on_step_start)
            return _update_reply(message, context, client, summarize, event="statistics sent")
        if category == "query":
            return node_info_reply(message, client.node_info)
        if action == "personalized":
            return _personalized_reply(message, client)
        if action == "encoder":
            return _encoder_reply(message, client)
        train = partial(_train, message, client, on_step_start)
        return _update_reply(message, context, client, train, event="update sent")
    except Exception as error:  # the server needs a reply for any failure
        return failure_reply(message, context, error)


def failure_reply(message: Message, context: Context, error: Exception) -> Message:
    """Return the error reply for an error, and log the error on an edge client."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    name = OUT_OF_MEMORY if is_out_of_memory(error) else type(error).__name__  # Ray's engine retries the client
    is_sentence = isinstance(error, InputError) and name != OUT_OF_MEMORY
    reason = str(error) if is_sentence else f"{name}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
    if is_simulated(context.node_config):
        log.debug("the client failed", exc_info=error)
    else:
        log.error("%s", reason, exc_info=None if isinstance(error, RequestRefused) else error)
        with suppress(Exception):  # the configuration of the node may be the error
            record(EdgeClient.read(context.node_config).states, "refused", reason=sanitize_line(str(error)))
        reason = safe_error_message(error)
    return error_reply(message, reason)


def _personalized_reply(message: Message, client: Client) -> Message:
    """Return the personalized encoder of a simulated client. Edge clients refuse."""
    if isinstance(client, EdgeClient):
        raise RequestRefused("what a device uses itself stays on it")
    plan = TrainPlan.from_content(message.content)
    request = PersonalizedModelRequest.from_content(message.content)
    settings = parse_client_config(plan.settings)
    folder = client.state_folder(settings.states)

    def run(worker: ClientWorker) -> ClientUpdate:
        return worker.personalized_encoder(plan, client.number, folder, request=request, store=client.store)

    encoder = _with_retry(run, client, plan, settings)
    return Message(encoder.to_content(plan), reply_to=message)


def _encoder_reply(message: Message, client: Client) -> Message:
    """Store an encoder that the server delivers to a device. The reply has its quality if the owner shares it."""
    if not isinstance(client, EdgeClient):
        raise RequestRefused("a simulated client stores no encoder")
    check_message(message.content, client.limits)
    delivery = EncoderDelivery.from_content(message.content)
    file = store_encoder(delivery, client.states, authority=client.authority, folders=client.folders)
    log.info("run %s: the encoder of round %d is stored", delivery.run_id, delivery.round)
    record(client.states, "encoder stored", run=delivery.run_id, round=delivery.round, bytes=len(delivery.content))
    return Message(_shared_quality(client, delivery, file), reply_to=message)


def _shared_quality(client: EdgeClient, delivery: EncoderDelivery, file: Path) -> RecordDict:
    """Return the quality of a stored encoder; nothing if the owner does not share it, or if it is not available."""
    if not client.limits.share_quality:
        return RecordDict()
    try:
        content = quality_content(encoder_quality(file, client.data_path, folders=client.folders))
        _count_sent(client, content, "quality sent", run=delivery.run_id, round=delivery.round)
    except InputError as reason:  # the encoder is stored
        log.warning(
            "run %s: the quality of the encoder of round %d is not sent: %s", delivery.run_id, delivery.round, reason
        )
        return RecordDict()
    return content


def _update_reply(
    message: Message,
    context: Context,
    client: Client,
    work: Callable[[], tuple[TrainPlan, ClientUpdate]],
    *,
    event: str,
) -> Message:
    """Do the work of a plan on this node's images and pack the update, or run a phase of secure aggregation."""
    if is_secure(message):
        stage = str(message.content.config_records[SECAGG_CONFIG_KEY].get("stage"))
        limits = client.limits if isinstance(client, EdgeClient) else None
        reply = secagg_reply(message, context, work, limits)
        if isinstance(client, EdgeClient):
            _count_sent(client, reply.content, "secure aggregation", stage=stage)
        return reply
    if isinstance(client, EdgeClient) and client.only_sums:
        raise RequestRefused(
            "this device takes part in secure aggregation only (secure-aggregation-only); set "
            "secure_aggregation=secagg_plus"
        )
    plan, update = work()
    content = update.to_content(plan, plan_codec(message.content))
    if isinstance(client, EdgeClient):
        _count_sent(client, content, event, round=plan.round)
    return Message(content, reply_to=message)


def _count_sent(client: EdgeClient, content: RecordDict, event: str, **details: int | str) -> None:
    """Count and record a message that leaves the device; raises `RequestRefused` beyond the budget."""
    num_bytes = content_bytes(content)
    client.limits.count_message(client.states, num_bytes)
    described = ", ".join(f"{name} {value}" for name, value in details.items())
    log.info("%s (%s): %d bytes leave this device", event, described, num_bytes)
    record(client.states, event, **details, bytes=num_bytes)


def _statistics(message: Message, client: Client, on_step_start: StepHook) -> tuple[TrainPlan, ClientUpdate]:
    """Return the sums of this node's images as an update."""
    plan = _read_plan(message, client)
    if isinstance(client, EdgeClient):
        settings, check_deadline = client.accept(plan.settings), client.limits.make_deadline_check()
        client.limits.check_now(client.states)
        forget_images()  # files may have changed since another run
        images = load_federated(settings.data).images

        def before_step() -> None:
            on_step_start()
            check_deadline()

        return answer(plan, images, torch.arange(len(images)), on_step_start=before_step)
    data, partition = parse_client_images(plan.settings)
    image_data = load_federated(data)
    parts = client_indices(partition, image_data)
    images, rows = shifted(image_data.images, parts, partition), torch.from_numpy(parts[client.number])
    return answer(plan, images, rows, on_step_start=on_step_start)


def _read_plan(message: Message, client: Client) -> TrainPlan:
    """Return the plan of a message within the limits of this node, from a server with the same code."""
    if isinstance(client, EdgeClient):
        check_message(message.content, client.limits)
    plan = TrainPlan.from_content(message.content)
    if plan.code_fingerprint != code_fingerprint():
        raise RequestRefused(
            f"the client runs other code ({code_fingerprint()}) than the server ({plan.code_fingerprint})"
        )
    return plan


def _train(message: Message, client: Client, on_step_start: StepHook) -> tuple[TrainPlan, ClientUpdate]:
    plan = _read_plan(message, client)
    if isinstance(client, EdgeClient):
        return plan, _train_on_device(plan, client, on_step_start)
    settings = parse_client_config(plan.settings)
    folder = client.state_folder(settings.states)

    def run(worker: ClientWorker) -> ClientUpdate:
        return worker.train(plan, client.number, folder, store=client.store)

    return plan, _with_retry(run, client, plan, settings)


def _with_retry(
    run: Callable[[ClientWorker], ClientUpdate],
    client: Client,
    plan: TrainPlan,
    settings: ClientSettings,
    *,
    images: str = "",
    on_step_start: StepHook = lambda: None,
) -> ClientUpdate:
    """Run with this process's worker, as `run_with_retry`, unless the engine retries."""
    if isinstance(client, SimulatedClient) and client.engine_retries:
        return run(worker_for(settings, images=images))

    def try_steps(batch_size: int, precision: str) -> None:
        worker_for(settings, images=images).try_steps(
            plan,
            client.number,
            client.state_folder(settings.states),
            batch_size=batch_size,
            precision=precision,
            store=client.store,
            on_step_start=on_step_start,
        )

    return run_with_retry(
        lambda used: run(worker_for(used, images=images)),
        settings=settings,
        stages=(plan.num_stages, plan.num_frozen_stages),
        try_steps=try_steps,
        names_others=isinstance(client, SimulatedClient),
    )


def _train_on_device(plan: TrainPlan, client: EdgeClient, on_step_start: StepHook) -> ClientUpdate:
    """Train on a device, within its limits. After an error the worker is not used again."""
    check_plan(plan)
    settings, check_deadline = client.settings(plan.settings), client.limits.make_deadline_check()

    def before_step() -> None:
        on_step_start()
        check_deadline()

    run = settings.states.name
    log.info("run %s, round %d: %d epochs of training are requested", run, plan.round, settings.training.epochs)
    folder, images_digest = client.state_folder(settings.states), client.images_digest()
    if plan.last_used_round is not None:  # the server lacks the updates of later rounds, or has been set back
        remove_versions_after(folder, STATE_SUFFIX, plan.last_used_round)

    def train(worker: ClientWorker) -> ClientUpdate:
        client.check_rank(received_rank(worker.method, plan))
        cache = load_federated(settings.data).folder  # of the images that the worker has loaded
        if cache is not None:
            delete_other_caches(cache)
        return worker.train(plan, client.number, folder, store=client.store, on_step_start=before_step)

    try:
        update = _with_retry(train, client, plan, settings, images=images_digest, on_step_start=before_step)
    except BaseException:
        release_worker()
        raise
    images, seconds, loss = update.num_examples, update.seconds or 0.0, update.train_loss
    log.info("run %s, round %d: trained on %s images in %.0f s, loss %.4g", run, plan.round, images, seconds, loss)
    details = {"images": images, "seconds": round(seconds, 1), "loss": loss, "epochs": settings.training.epochs}
    unreadable = 0 if images is None else client.num_training_files(settings) - images
    if unreadable:
        log.info("run %s, round %d: %d images were skipped because they are not readable", run, plan.round, unreadable)
        details["unreadable"] = unreadable
    record(client.states, "trained", run=run, round=plan.round, **details)
    return update
