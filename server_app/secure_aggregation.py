"""The server side of secure aggregation: the mean of clients' deltas by Flower's SecAgg+ workflow.

The workflow has Flower's older interface and needs a strategy and a client manager. A small stub replaces both.
Messages go through the `MessageExchange` of the run, with its deadline.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict

from fedssl.arrays import Layers
from fedssl.compat import (
    SecAggPlusWorkflow,
    WorkflowState,
    empty_instructions,
    parameters_to_ndarrays,
    workflow_records,
)
from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.errors import RunError
from fedssl.wire.records import content_bytes
from fedssl.wire.secure_aggregation import MIN_CLIENTS, SECAGG_PARAMETERS, summed_names
from server_app.messaging import MessageExchange


class TooFewParticipants(RunError):
    """Fewer clients replied than are needed to remove the masks."""


@dataclass(frozen=True)
class SecureMean:
    """Mean over clients, in the order of `summed_names`, their nodes, and bytes by node."""

    delta: np.ndarray
    nodes: list[int]
    bytes_down: dict[int, int]
    bytes_up: dict[int, int]


def secure_mean_delta(
    exchange: MessageExchange,
    contents: Mapping[int, RecordDict],
    settings: SecureAggregationSettings,
    *,
    round: int,
    timeout: float,
    deadline: float | None,
) -> SecureMean:
    """Run the four stages of the protocol with the nodes of ``contents``; raises `TooFewParticipants`."""
    if len(contents) < MIN_CLIENTS:
        raise TooFewParticipants(f"{len(contents)} clients are available, and secure aggregation needs {MIN_CLIENTS}")
    workflow = SecAggPlusWorkflow(
        1.0,
        settings.threshold,
        max_weight=SECAGG_PARAMETERS["max_weight"],
        quantization_range=int(SECAGG_PARAMETERS["target_range"]),
        modulus_range=int(SECAGG_PARAMETERS["mod_range"]),
        clipping_range=float(settings.clipping_range),
        timeout=timeout,
    )
    stages, stub = _GridAdapter(exchange, timeout=timeout, deadline=deadline), _StrategyStub(list(contents))
    records = workflow_records(round)
    context: Any = SimpleNamespace(state=records, strategy=stub, client_manager=stub, history=None)
    grid: Any = stages
    state = WorkflowState()
    with _quiet("flwr"):
        try:
            ok = workflow.setup_stage(grid, context, state)
            # The plan is sent in the third stage, in a separate record per client, to which Flower adds.
            state.nid_to_fitins = {node: RecordDict({**content}) for node, content in contents.items()}
            ok = ok and workflow.share_keys_stage(grid, context, state)
            # Flower would also request shares of clients that failed before they sent any.
            state.sampled_node_ids = active = set(state.active_node_ids)
            state.nid_to_neighbours = {node: others & active for node, others in state.nid_to_neighbours.items()}
            ok = ok and workflow.collect_masked_vectors_stage(grid, context, state)
            nodes = sorted(state.active_node_ids)
            ok = ok and workflow.unmask_stage(grid, context, state)
        except Exception as error:  # whatever a peer may have put into a message
            raise TooFewParticipants(f"secure aggregation failed ({type(error).__name__}: {error})") from error
    if not ok:
        reasons = "; ".join(stages.reasons) or "no reply in time"
        raise TooFewParticipants(f"too few clients completed secure aggregation ({reasons})")
    (delta,) = parameters_to_ndarrays(stub.result)
    return SecureMean(delta, nodes, stages.bytes_down, stages.bytes_up)


def apply_delta(layers: Layers, delta: np.ndarray) -> Layers:
    """Add a delta of `delta_of` to the layers, without counters.

    Raises `TooFewParticipants` if it has another length or is not finite.
    """
    names = summed_names(layers)
    if delta.ndim != 1 or len(delta) != sum(layers[name].size for name in names) or not np.isfinite(delta).all():
        raise TooFewParticipants("the sum of secure aggregation does not fit the model")
    applied, start = dict(layers), 0
    for name in names:
        array = layers[name]
        part = delta[start : start + array.size].reshape(array.shape)
        applied[name], start = (array + part).astype(array.dtype), start + array.size
    return applied


@dataclass
class _StrategyStub:
    """Stub of the workflow's strategy and client manager."""

    nodes: list[int]
    result: Any = None

    def configure_fit(self, *_: object) -> list[tuple[SimpleNamespace, Any]]:
        return [(SimpleNamespace(node_id=node), empty_instructions()) for node in self.nodes]

    def aggregate_fit(self, round: int, results: list[tuple[Any, Any]], failures: object) -> tuple[None, None]:
        self.result = results[0][1].parameters  # every client has the same, the mean
        return None, None

    def num_available(self) -> int:
        return len(self.nodes)


@dataclass
class _GridAdapter:
    """Adapter of the exchange to the workflow's grid: one reply per node, as a list."""

    exchange: MessageExchange
    timeout: float
    deadline: float | None
    bytes_down: dict[int, int] = field(default_factory=dict)
    bytes_up: dict[int, int] = field(default_factory=dict)
    reasons: dict[str, None] = field(default_factory=dict)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        for message in messages:
            self._count(self.bytes_down, message.metadata.dst_node_id, content_bytes(message.content))
        replies: dict[int, Message] = {}
        for message, reply in self.exchange.send_and_receive(messages, timeout=self.timeout, deadline=self.deadline):
            node = message.metadata.dst_node_id
            if reply.has_error():
                self.reasons[reply.error.reason or "an error"] = None
            elif node == reply.metadata.src_node_id:
                replies[node] = reply
                self._count(self.bytes_up, node, content_bytes(reply.content))
        return list(replies.values())

    @staticmethod
    def _count(counts: dict[int, int], node: int, number: int) -> None:
        counts[node] = counts.get(node, 0) + number


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
