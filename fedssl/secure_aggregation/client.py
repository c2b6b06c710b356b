"""The client's side of secure aggregation: the four phases of SecAgg+, in the wire format of Flower 1.41.

The functions of the phases get the values of a message's record and return those of the reply. What is needed later is
in the state, which the context stores between messages. The client refuses messages that do not follow the protocol
(`RequestRefused`).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from cryptography.fernet import InvalidToken
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedssl.errors import RequestRefused
from fedssl.fleet.limits import Limits
from fedssl.logs import log
from fedssl.secure_aggregation.flower_internals import (
    bytes_to_private_key,
    bytes_to_public_key,
    decrypt,
    encrypt,
    generate_key_pairs,
    generate_shared_key,
    ndarray_to_bytes,
    private_key_to_bytes,
    public_key_to_bytes,
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from fedssl.secure_aggregation.graph import check_limits, check_setup
from fedssl.secure_aggregation.masks import add_mask, quantize, rounding_generator
from fedssl.secure_aggregation.protocol import (
    COLLECT,
    KEY_BYTES,
    MASK_GENERATOR,
    PHASES,
    SECAGG_CONFIG_KEY,
    SEED_BYTES,
    SETUP,
    SHARE_KEYS,
    TARGET_RANGE,
    UNIFORM_WEIGHT,
    UNMASK,
    delta_of,
    read_public_key,
)
from fedssl.secure_aggregation.shamir import create_shares, is_share
from fedssl.wire.messages import ClientUpdate, TrainPlan

Record = dict[str, Any]


@dataclass
class SecAggState:
    """State of a client between the phases. Lists of shares are in the order of ``owners``."""

    phase: str = UNMASK  # the last one
    node: int = 0
    share_num: int = 0
    threshold: int = 0
    clipping_range: float = 0.0
    max_weight: float = 0.0
    mask_generator: str = ""
    mask_key: bytes = b""  # private keys
    share_key: bytes = b""
    mask_public: bytes = b""
    share_public: bytes = b""
    seed: bytes = b""  # of the client's own mask
    neighbors: list[int] = field(default_factory=list)
    neighbor_mask_publics: list[bytes] = field(default_factory=list)
    neighbor_secrets: list[bytes] = field(default_factory=list)  # keys of the encrypted shares
    unreadable: list[int] = field(default_factory=list)  # neighbors that sent malformed shares
    owners: list[int] = field(default_factory=list)
    seed_shares: list[bytes] = field(default_factory=list)
    key_shares: list[bytes] = field(default_factory=list)

    @classmethod
    def read(cls, record: ConfigRecord | None) -> "SecAggState":
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in (record or {}).items() if name in names})  # type: ignore[arg-type]  # values of records have no types

    def to_record(self) -> ConfigRecord:
        return ConfigRecord(vars(self))


def setup(values: Mapping[str, Any], *, node: int) -> tuple[SecAggState, Record]:
    """Store validated parameters, and create the key pairs of masks and of shares."""
    (mask_key, mask_public), (share_key, share_public) = generate_key_pairs(), generate_key_pairs()
    state = SecAggState(
        node=node,
        share_num=values["share_num"],
        threshold=values["threshold"],
        clipping_range=values["clipping_range"],
        max_weight=values["max_weight"],
        mask_generator=values.get(MASK_GENERATOR, "mt19937"),
        mask_key=private_key_to_bytes(mask_key),
        share_key=private_key_to_bytes(share_key),
        mask_public=public_key_to_bytes(mask_public),
        share_public=public_key_to_bytes(share_public),
    )
    return state, {"pk1": state.mask_public, "pk2": state.share_public, MASK_GENERATOR: state.mask_generator}


def share_keys(state: SecAggState, values: Mapping[str, Any]) -> Record:
    """Encrypt a share of the own seed and of the private mask key for each neighbor."""
    publics = _read_publics(state, values)
    state.seed = os.urandom(SEED_BYTES)
    seed_shares = create_shares(state.seed, state.threshold, state.share_num)
    key_shares = create_shares(state.mask_key, state.threshold, state.share_num)
    private, ciphertexts = bytes_to_private_key(state.share_key), []
    for (node, (mask_public, share_public)), seed_share, key_share in zip(
        publics.items(), seed_shares, key_shares, strict=False
    ):
        if node == state.node:
            state.owners, state.seed_shares, state.key_shares = [node], [seed_share], [key_share]
            continue
        secret = generate_shared_key(private, bytes_to_public_key(share_public))
        state.neighbors.append(node)
        state.neighbor_mask_publics.append(mask_public)
        state.neighbor_secrets.append(secret)
        ciphertexts.append(encrypt(secret, share_keys_plaintext_concat(state.node, node, seed_share, key_share)))
    return {"dsts": list(state.neighbors), "ctxts": ciphertexts}


def collect(state: SecAggState, values: Mapping[str, Any], train: Callable[[], tuple[np.ndarray, int]]) -> Record:
    """Store the neighbors' shares, and mask the quantized update of a training with its weight."""
    senders = _read_shares(state, values)
    delta, weight = train()
    vector = np.empty(1 + len(delta), np.uint32)
    vector[0] = steps = round(weight / state.max_weight * TARGET_RANGE)
    vector[1:] = quantize(
        delta,
        rounding_generator(delta),
        clipping_range=state.clipping_range,
        target_range=TARGET_RANGE,
        weight=steps / TARGET_RANGE,
    )
    generator = state.mask_generator
    add_mask(vector, state.seed, generator=generator, sign=1)
    private = bytes_to_private_key(state.mask_key)
    for node, public in zip(state.neighbors, state.neighbor_mask_publics, strict=True):
        if node in senders:
            secret = generate_shared_key(private, bytes_to_public_key(public))
            add_mask(vector, secret, generator=generator, sign=1 if state.node > node else -1)
    return {"masked_params": [ndarray_to_bytes(vector[:1]), ndarray_to_bytes(vector[1:])]}


def unmask(state: SecAggState, values: Mapping[str, Any]) -> Record:
    """Reveal a share of the seed of each surviving client, and of the mask key of each one that dropped out.

    Those of neighbors that sent malformed shares are missing.
    """
    active, dead = values.get("active_nids"), values.get("dead_nids")
    if not (isinstance(active, list) and isinstance(dead, list)) or set(active) & set(dead):
        raise RequestRefused("secure aggregation was asked for both shares of a client, which would reveal its update")
    known = {*state.owners, *state.unreadable}
    if state.node not in active or not set(active) | set(dead) <= known or len(active) < state.threshold:
        raise RequestRefused(
            f"secure aggregation was asked to unmask {len(active)} clients of which at least {state.threshold} must be "
            "neighbors that survived, and this client one of them"
        )
    seeds, keys = (dict(zip(state.owners, shares, strict=True)) for shares in (state.seed_shares, state.key_shares))
    active, dead = ([node for node in nodes if node in seeds] for nodes in (active, dead))
    reply = {"nids": [*active, *dead], "shares": [seeds[node] for node in active] + [keys[node] for node in dead]}
    vars(state).update(vars(SecAggState()))  # secrets are used once
    return reply


def _read_publics(state: SecAggState, values: Mapping[str, Any]) -> dict[int, tuple[bytes, bytes]]:
    """Return the validated public keys of the neighbors and of the client itself, by node."""
    try:
        publics = {int(node): (read_public_key(mask), read_public_key(share)) for node, (mask, share) in values.items()}
    except (TypeError, ValueError) as error:
        raise RequestRefused("secure aggregation sent no pairs of public keys") from error
    if not state.threshold <= len(publics) <= state.share_num:
        raise RequestRefused(
            f"secure aggregation sent the keys of {len(publics)} neighbors, this client included, but "
            f"{state.threshold} to {state.share_num} are needed"
        )
    if publics.get(state.node) != (state.mask_public, state.share_public):
        raise RequestRefused("secure aggregation sent other keys of this client than its own")
    if len({key for pair in publics.values() for key in pair}) < 2 * len(publics):
        raise RequestRefused("secure aggregation sent a public key twice")
    return publics


def _read_shares(state: SecAggState, values: Mapping[str, Any]) -> set[int]:
    """Store the shares that neighbors sent, and return these neighbors."""
    senders, ciphertexts = values.get("srcs"), values.get("ctxts")
    if not (isinstance(senders, list) and isinstance(ciphertexts, list)) or len(senders) != len(ciphertexts):
        raise RequestRefused("secure aggregation sent no shares of neighbors")
    if len(set(senders)) < len(senders) or not set(senders) <= set(state.neighbors):
        raise RequestRefused("secure aggregation sent shares of nodes that are no neighbors")
    if len(senders) + 1 < state.threshold:
        raise RequestRefused(
            f"{len(senders)} neighbors of this client sent shares but {state.threshold - 1} are needed to remove a mask"
        )
    secrets = dict(zip(state.neighbors, state.neighbor_secrets, strict=True))
    for sender, ciphertext in zip(senders, ciphertexts, strict=True):
        shares = _decrypted(ciphertext, secrets[sender], sender=sender, state=state)
        if shares is None:  # of this neighbor alone; other shares may be enough
            log.warning("the shares of node %d cannot be read", sender)
            state.unreadable.append(sender)
            continue
        state.owners.append(sender)
        state.seed_shares.append(shares[0])
        state.key_shares.append(shares[1])
    return set(senders)


def _decrypted(ciphertext: Any, secret: bytes, *, sender: int, state: SecAggState) -> tuple[bytes, bytes] | None:
    """Return the shares of a neighbor's seed and of its key; None if they are malformed, or those of another node."""
    try:
        plaintext = decrypt(secret, ciphertext)
    except (InvalidToken, TypeError):
        return None
    source, destination, seed_share, key_share = share_keys_plaintext_separate(plaintext)
    is_valid = is_share(seed_share, secret_bytes=SEED_BYTES, num=state.share_num)
    is_valid &= is_share(key_share, secret_bytes=KEY_BYTES, num=state.share_num)
    return (seed_share, key_share) if is_valid and (source, destination) == (sender, state.node) else None


STATE = "secaggplus_state"  # name of the record that a client stores between the phases


def is_secure(message: Message) -> bool:
    """Return whether a message belongs to the protocol."""
    return SECAGG_CONFIG_KEY in message.content.config_records


def secagg_reply(
    message: Message,
    context: Context,
    train: Callable[[], tuple[TrainPlan, ClientUpdate]],
    limits: Limits | None = None,
) -> Message:
    """Return the reply to one phase of the protocol. ``train`` is called in the collect phase.

    Raises `RequestRefused` if the server's parameters would reveal more than a sum, or are below an edge client's
    ``limits``; simulated clients have none.
    """
    values = dict(message.content.config_records[SECAGG_CONFIG_KEY])
    phase = values.pop("stage", None)
    if phase == SETUP:
        check_setup(values)
        if limits is not None:
            check_limits(values, limits)
        state, reply = setup(values, node=message.metadata.dst_node_id)
    else:
        state = SecAggState.read(context.state.config_records.get(STATE))
        expected = PHASES[(PHASES.index(state.phase) + 1) % len(PHASES)]
        if phase != expected:
            raise RequestRefused(f"the phase {phase!r} of secure aggregation does not follow {state.phase!r}")
        if phase == SHARE_KEYS:
            reply = share_keys(state, values)
        elif phase == COLLECT:
            reply = collect(state, values, lambda: _weighted_delta(train, state))
        else:
            reply = unmask(state, values)
    state.phase = phase
    context.state.config_records[STATE] = state.to_record()
    return Message(RecordDict({SECAGG_CONFIG_KEY: ConfigRecord(reply)}), reply_to=message)


def _weighted_delta(train: Callable[[], tuple[TrainPlan, ClientUpdate]], state: SecAggState) -> tuple[np.ndarray, int]:
    """Return the change of the layers in a training, and the weight of the client."""
    plan, update = train()
    delta = delta_of(update.layers, plan.layers)
    _check_delta(delta, max_abs=state.clipping_range)
    if state.max_weight == UNIFORM_WEIGHT:
        return delta, UNIFORM_WEIGHT
    images = update.num_examples or 0
    if not 0 < images <= state.max_weight:  # a larger weight would count more than its masked sum can hold
        found = "more images" if images else "no images"
        raise RequestRefused(
            f"this client has {found}, but secure_aggregation.max_weight={state.max_weight:g} is the largest weight; "
            "raise it to the number of images of the largest client"
        )
    return delta, images


def _check_delta(delta: np.ndarray, *, max_abs: float) -> None:
    """Refuse non-finite values, which would invalidate the sum, and log clipped values."""
    if not np.isfinite(delta).all():
        raise RequestRefused("training diverged: the update has values that are not finite; lower optimizer.lr")
    clipped = int(np.count_nonzero(np.abs(delta) > max_abs))
    if clipped:
        log.warning(
            "%d values of the update exceed secure_aggregation.clipping_range=%g and are clipped to it",
            clipped,
            max_abs,
        )
