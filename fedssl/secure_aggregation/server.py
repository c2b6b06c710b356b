"""The server's side of one round of SecAgg+, in the wire format of Flower 1.41.

The masked vectors are added as they arrive. A reply that does not follow the protocol drops its client. In the last
phase its update is in the sum already. Then its shares alone are not used, and those of its neighbors may be enough.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedssl.config.aggregation_settings import SecureAggregationSettings
from fedssl.errors import InputError, RunError
from fedssl.safe_io import sanitize_line
from fedssl.secure_aggregation.flower_internals import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_shared_key,
)
from fedssl.secure_aggregation.graph import SharingGraph, graph_for, proposed_parameters, random_neighbors
from fedssl.secure_aggregation.masks import add_mask, dequantized_mean
from fedssl.secure_aggregation.protocol import (
    COLLECT,
    KEY_BYTES,
    MASK_GENERATOR,
    MIN_CLIENTS,
    SECAGG_CONFIG_KEY,
    SEED_BYTES,
    SETUP,
    SHARE_KEYS,
    TARGET_RANGE,
    UNIFORM_WEIGHT,
    UNMASK,
    check_secret,
    read_public_key,
)
from fedssl.secure_aggregation.shamir import is_share, secret_and_wrong_sender
from fedssl.wire.messages import NO_REPLY
from fedssl.wire.records import content_bytes, read_array

MAX_CIPHERTEXT = 1024  # bytes; the shares for a neighbor have 612

SendMessages = Callable[[list[Message]], Iterable[tuple[Message, Message]]]  # yields messages with their replies


class TooFewParticipants(RunError):
    """Fewer clients replied than are needed to remove the masks; ``dropped`` are reasons by node."""

    def __init__(self, message: str, dropped: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.dropped = dropped or {}


class _InvalidReply(Exception):
    """Reply that does not follow the protocol. Its client is dropped."""


@dataclass
class PhaseCost:
    """Cost of a phase on the server: seconds from the first message to the end of its computation, and bytes."""

    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    invalid: int = 0  # clients whose reply was not used, or is missing

    def line(self) -> dict[str, float]:
        """Return the cost for ``metrics.jsonl``, without a number of clients that is 0."""
        return {name: value for name, value in asdict(self).items() if value or name != "invalid"}


@dataclass
class SecureMean:
    """Weighted mean over clients, in the order of `summed_names`, their nodes, reasons of the others, bytes, costs."""

    graph: SharingGraph
    delta: np.ndarray = field(default_factory=lambda: np.zeros(0))
    mean_weight: float = 1.0  # of the clients, relative to the largest possible one
    nodes: list[int] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    unused_shares: dict[int, str] = field(default_factory=dict)  # reasons of clients that are in the sum
    bytes_down: dict[int, int] = field(default_factory=dict)
    bytes_up: dict[int, int] = field(default_factory=dict)
    phases: dict[str, PhaseCost] = field(default_factory=dict)


def secure_mean_delta(
    send: SendMessages,
    contents: Mapping[int, RecordDict],
    settings: SecureAggregationSettings,
    *,
    length: int,
    round: int,
    max_weight: int = UNIFORM_WEIGHT,
    min_clients: int = 0,
    message_type: str = "train",
) -> SecureMean:
    """Run the four phases with the nodes of ``contents``, whose deltas have a length; raises `TooFewParticipants`.

    ``send`` yields the messages with their replies. Clients have weights of at most ``max_weight``, of which the server
    reads the sum; `UNIFORM_WEIGHT`: equal ones. Nothing is unmasked with fewer than ``min_clients``: if the caller
    repeated the exchange, the difference of two sums would be the update of a client that is in one of them.
    """
    if len(contents) < MIN_CLIENTS:
        raise TooFewParticipants(f"{len(contents)} clients are available, and secure aggregation needs {MIN_CLIENTS}")
    try:
        graph = graph_for(settings, len(contents))
    except InputError as reason:
        raise TooFewParticipants(str(reason)) from reason
    total = np.zeros(1 + length, np.uint32)
    return _Round(send, graph, settings, SecureMean(graph), total, round, max_weight, min_clients, message_type).run(
        contents
    )


@dataclass
class _Round:
    """One round of the protocol. The sets of nodes shrink from phase to phase."""

    _send: SendMessages
    _graph: SharingGraph
    _settings: SecureAggregationSettings
    _result: SecureMean
    _total: np.ndarray  # of the masked vectors, which start with their weight
    _round: int
    _max_weight: int
    _min_clients: int
    _message_type: str
    _neighbors: dict[int, set[int]] = field(default_factory=dict)  # with the node itself
    _publics: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    _keys: set[bytes] = field(default_factory=set)
    _inbox: dict[int, dict[int, bytes]] = field(default_factory=dict)  # encrypted shares, by receiver and sender
    _alive: set[int] = field(default_factory=set)  # nodes whose masked vectors are in the sum
    _unreadable: set[int] = field(default_factory=set)  # nodes with a share that a neighbor could not read
    _shares: dict[int, dict[int, bytes]] = field(default_factory=dict)  # by owner of the secret, and sender

    def run(self, contents: Mapping[int, RecordDict]) -> SecureMean:
        graph, settings, result = self._graph, self._settings, self._result
        self._neighbors = random_neighbors(list(contents), graph.neighbors)
        proposal = {**proposed_parameters(settings, graph), "max_weight": float(self._max_weight)}
        with self._phase(SETUP):
            nodes = self._exchange(SETUP, {node: _record(proposal) for node in contents}, self._read_publics)
        with self._phase(SHARE_KEYS):
            keys = {
                node: _record({str(other): list(self._publics[other]) for other in self._neighbors[node] & nodes})
                for node in nodes
            }
            sharing = self._exchange(SHARE_KEYS, keys, self._read_ciphertexts)
        self._neighbors = {node: self._neighbors[node] & sharing for node in sharing}
        with self._phase(COLLECT):
            plans = {}
            for node in sharing:
                inbox = {sender: text for sender, text in self._inbox.get(node, {}).items() if sender in sharing}
                shares = _record({"srcs": list(inbox), "ctxts": list(inbox.values())})
                plans[node] = RecordDict({**contents[node], **shares})
            self._alive = alive = self._exchange(COLLECT, plans, self._add_masked)
        with self._phase(UNMASK):
            requests = {}
            for node in alive:
                others = self._neighbors[node]
                requests[node] = _record({"active_nids": list(others & alive), "dead_nids": list(others - alive)})
            self._shares = {node: {} for node in sharing}
            self._exchange(UNMASK, requests, self._read_shares)
            self._remove_masks(sharing, alive)
            result.phases[UNMASK].invalid = len(result.unused_shares)
        result.nodes = sorted(alive)
        result.mean_weight = int(self._total[0]) / (len(alive) * TARGET_RANGE)
        result.delta = dequantized_mean(
            self._total[1:],
            clients=len(alive),
            total_weight=int(self._total[0]),
            clipping_range=settings.clipping_range,
            target_range=TARGET_RANGE,
        )
        return result

    # --- messages ---

    def _exchange(
        self, phase: str, contents: Mapping[int, RecordDict], read: Callable[[int, Mapping[str, Any]], None]
    ) -> set[int]:
        """Send the messages of a phase, and return the nodes with a valid reply, of which enough must remain."""
        cost, result = self._result.phases[phase], self._result
        for content in contents.values():
            content.config_records[SECAGG_CONFIG_KEY]["stage"] = phase
        messages = [
            Message(content=content, dst_node_id=node, message_type=self._message_type, group_id=str(self._round))
            for node, content in contents.items()
        ]
        for node, content in contents.items():
            cost.bytes_down += _count(result.bytes_down, node, content_bytes(content))
        reasons, valid = dict.fromkeys(contents, NO_REPLY), set()
        for message, reply in self._send(messages):
            node = message.metadata.dst_node_id
            try:
                if reply.has_error():
                    raise _InvalidReply(reply.error.reason or "an error")
                if reply.metadata.src_node_id != node:
                    raise _InvalidReply("another node replied")
                cost.bytes_up += _count(result.bytes_up, node, content_bytes(reply.content))
                read(node, reply.content.config_records.get(SECAGG_CONFIG_KEY) or {})
                valid.add(node)
                del reasons[node]
            except _InvalidReply as reason:
                reasons[node] = sanitize_line(str(reason), max_chars=500)
            except Exception as error:  # whatever a peer may have put into a message
                reasons[node] = sanitize_line(f"its reply cannot be read ({type(error).__name__}: {error})")
            del reply
        if phase == UNMASK:  # these clients are in the sum
            reasons |= dict.fromkeys(self._unreadable - reasons.keys(), "its neighbors could not read its shares")
            result.unused_shares = reasons
        else:
            result.dropped |= reasons
        cost.invalid = len(reasons)
        self._require_enough(phase, valid, reasons)
        return valid

    def _require_enough(self, phase: str, valid: set[int], reasons: Mapping[int, str]) -> None:
        """Raise `TooFewParticipants` if more clients dropped out than the graph tolerates."""
        graph, remedy = self._graph, "a larger secure_aggregation.dropout_fraction tolerates more dropouts"
        if phase == UNMASK:
            enough = all(len(shares) >= graph.threshold for shares in self._shares.values())
            needed = f"{graph.threshold} of the {graph.shares} shares of every client are"
        else:
            fewest = max(graph.clients - graph.max_dropouts, self._min_clients)
            if fewest == self._min_clients:
                remedy = f"a smaller aggregation.min_updates and {remedy}"
            enough, needed = len(valid) >= fewest, f"{fewest} are"
        if not enough:
            dropped = {**self._result.dropped, **reasons}
            texts = sanitize_line("; ".join(dict.fromkeys(dropped.values())), max_chars=500)
            raise TooFewParticipants(
                f"too few clients completed secure aggregation: {len(valid)} of {graph.clients} after the phase "
                f"{phase}, and {needed} needed ({texts}); {remedy}",
                dropped,
            )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        cost, start = self._result.phases.setdefault(name, PhaseCost()), time.monotonic()
        yield
        cost.seconds = time.monotonic() - start

    # --- replies ---

    def _read_publics(self, node: int, values: Mapping[str, Any]) -> None:
        try:
            publics = (read_public_key(values.get("pk1")), read_public_key(values.get("pk2")))
        except ValueError as error:  # the keys of one client must not stop its neighbors
            raise _InvalidReply("it sent no public keys") from error
        if publics[0] == publics[1] or not self._keys.isdisjoint(publics):
            raise _InvalidReply("it sent a public key twice, or that of another client")
        generator = values.get(MASK_GENERATOR, "mt19937")
        if generator != self._settings.mask_generator:
            raise _InvalidReply(
                f"it masks with {generator} but secure_aggregation.mask_generator={self._settings.mask_generator}"
            )
        self._keys |= set(publics)
        self._publics[node] = publics

    def _read_ciphertexts(self, node: int, values: Mapping[str, Any]) -> None:
        receivers, texts = _lists(values, "dsts", int, "ctxts", bytes)
        if set(receivers) != (self._neighbors[node] & self._publics.keys()) - {node}:
            raise _InvalidReply("it sent shares for other nodes than its neighbors")
        if max(map(len, texts), default=0) > MAX_CIPHERTEXT:
            raise _InvalidReply(f"it sent shares of more than {MAX_CIPHERTEXT} bytes")
        for receiver, text in zip(receivers, texts, strict=True):
            self._inbox.setdefault(receiver, {})[node] = text

    def _add_masked(self, node: int, values: Mapping[str, Any]) -> None:
        try:
            weight, vector = (read_array(data, name="masked_params") for data in values["masked_params"])
        except (KeyError, TypeError, ValueError) as error:
            raise _InvalidReply("it sent no masked update") from error
        for array, length in ((weight, 1), (vector, len(self._total) - 1)):
            if array.dtype.kind not in "iu" or array.dtype.itemsize < 4 or array.shape != (length,):
                raise _InvalidReply(f"its masked update is no vector of {length} integers")
        self._total[:1] += weight.astype(np.uint32)  # modulo 2^32
        self._total[1:] += vector.astype(np.uint32, copy=False)

    def _read_shares(self, node: int, values: Mapping[str, Any]) -> None:
        owners, shares = _lists(values, "nids", int, "shares", bytes)
        if not {node} <= set(owners) <= self._neighbors[node]:
            raise _InvalidReply("it sent shares of other nodes than its neighbors")
        for owner, share in zip(owners, shares, strict=True):
            secret_bytes = SEED_BYTES if owner in self._alive else KEY_BYTES
            if not is_share(share, secret_bytes=secret_bytes, num=self._graph.shares):
                raise _InvalidReply("it sent a malformed share")
        for owner, share in zip(owners, shares, strict=True):
            self._shares[owner][node] = share
        self._unreadable |= self._neighbors[node].difference(owners)

    def _remove_masks(self, sharing: set[int], alive: set[int]) -> None:
        """Remove the own masks of surviving clients, and their masks with clients that dropped out."""
        generator, liars = self._settings.mask_generator, set[int]()
        for owner in sharing:
            shares = {node: share for node, share in self._shares[owner].items() if node not in liars}
            check = partial(check_secret, public=None if owner in alive else self._publics[owner][0])
            try:
                secret, wrong = secret_and_wrong_sender(shares, self._graph.threshold, check=check)
            except ValueError as error:
                text = f"secure aggregation received wrong shares of the secret of node {owner}: {error}"
                raise TooFewParticipants(text) from error
            if wrong is not None:
                liars.add(wrong)
                self._result.unused_shares[wrong] = "it sent wrong shares"
            if owner in alive:
                add_mask(self._total, secret, generator=generator, sign=-1)
                continue
            private = bytes_to_private_key(secret)
            for other in self._neighbors[owner] & alive:
                pair = generate_shared_key(private, bytes_to_public_key(self._publics[other][0]))
                add_mask(self._total, pair, generator=generator, sign=1 if owner > other else -1)
        # Values of a wrong sum are random: each is in the range with a probability of len(alive) / 1024.
        largest, weight = len(alive) * TARGET_RANGE, int(self._total[0])
        is_uniform = self._max_weight == UNIFORM_WEIGHT
        if not (weight == largest if is_uniform else 0 < weight <= largest) or self._total.max() > largest:
            raise TooFewParticipants("secure aggregation received wrong shares or masks: the sum is wrong")


def _record(values: Mapping[str, Any]) -> RecordDict:
    return RecordDict({SECAGG_CONFIG_KEY: ConfigRecord({**values})})


def _lists(
    values: Mapping[str, Any], key: str, kind: type, other: str, other_kind: type
) -> tuple[list[Any], list[Any]]:
    """Return two lists of the same length, and of distinct values in the first; raises `_InvalidReply`."""
    first, second = values.get(key), values.get(other)
    if (
        not (isinstance(first, list) and isinstance(second, list))
        or len(first) != len(second)
        or len(set(first)) != len(first)
        or not all(isinstance(value, kind) for value in first)
        or not all(isinstance(value, other_kind) for value in second)
    ):
        raise _InvalidReply(f"it sent no lists {key} and {other} of the same length")
    return first, second


def _count(counts: dict[int, int], node: int, number: int) -> int:
    counts[node] = counts.get(node, 0) + number
    return number
