"""Size and eviction of the client states of a simulation, whose files clients write into the run folder.

If the newest states of all clients are larger than ``client_state.max_bytes``, those of the clients whose last used
update is longest ago are evicted: such a client starts its next round as if it had never participated. Its files are
deleted when no checkpoint needs them. Older versions, which checkpoints need, do not count. The states of dropped
clients do, although the server does not know their rounds: the clients load them at their next participation.
"""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedssl.atomic_files import round_file, saved_rounds
from fedssl.logs import log
from fedssl.rules import Problem
from fedssl.runs.manifest import CLIENT_STATES, STATE_SUFFIX, ClientStateParts, Part, client_folder
from server_app.client_models import ClientModels
from server_app.updates import RoundResult
from strategies.rules import RunParts
from strategies.types import ServerState


class ClientStates:
    """Client states of a run folder. ``max_bytes`` None has no limit."""

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self._folder, self.checkpoints, self._max_bytes = folder / CLIENT_STATES, folder / "checkpoints", max_bytes
        self._parts = ClientStateParts(folder)
        self._sizes: dict[int, int] | None = None  # by client, of the newest versions
        self._total = 0  # of these
        self._warned = False
        self._deleted: set[int] = set()  # evicted clients without files

    @property
    def oldest_resumable(self) -> int:
        """Return the round of the oldest checkpoint; 0 if there is none."""
        return min(saved_rounds(self.checkpoints), default=0)

    def parts(self, state: ServerState) -> list[Part]:
        return self._parts.up_to(state.round, without=state.evicted)

    def end_round(self, state: ServerState, result: RoundResult) -> tuple[ServerState, RoundResult]:
        """Evict client states beyond the limit, and write the models of single clients that have changed.

        Called before the checkpoint of the round. The states that clients have saved in it are on the disk.
        """
        participants = [row.client for row in result.clients]
        evicted = {client: round for client, round in state.evicted.items() if client not in participants}
        state, metrics = self._evict(replace(state, evicted=evicted), [*participants, *result.dropped])
        if isinstance(state.models, ClientModels):
            saved = state.models.saved(round=state.round, oldest_resumable=self.oldest_resumable)
            state = replace(state, models=saved)
        return state, replace(result, state_metrics=metrics)

    def _evict(self, state: ServerState, clients: Iterable[int]) -> tuple[ServerState, dict[str, int]]:
        """Measure the states of the ``clients`` of the last round, and evict states beyond the limit.

        Delete the files of clients that were evicted up to the oldest checkpoint, also those that such a client has
        saved since then for an update that was dropped.
        """
        if not self._folder.is_dir():
            return state, {}
        oldest_resumable = self.oldest_resumable
        self._measure(state, clients)
        training = {entry["client"] for entry in state.in_flight.get("messages", {}).values()}
        deletable = {client for client, round in state.evicted.items() if round <= oldest_resumable} - training
        for client in deletable - self._deleted.difference(clients):
            shutil.rmtree(client_folder(self._folder, client), ignore_errors=True)
        self._deleted = deletable
        evicted = self._choose(state, training)
        metrics = {"state_bytes": self._total, "evicted_states": len(evicted)} if self._total or evicted else {}
        if not evicted:
            return state, metrics
        if not self._warned:
            self._warned = True
            log.warning(
                "client states exceed client_state.max_bytes=%d: %d clients start their next round without one",
                *(self._max_bytes, len(evicted)),
            )
        state = replace(
            state,
            evicted={**state.evicted, **dict.fromkeys(evicted, state.round)},
            state_rounds={client: round for client, round in state.state_rounds.items() if client not in evicted},
            last_participation={
                client: last for client, last in state.last_participation.items() if client not in evicted
            },
            dropped={client: round for client, round in state.dropped.items() if client not in evicted},
        )
        return state, metrics

    def _measure(self, state: ServerState, clients: Iterable[int]) -> None:
        counted = (state.last_participation.keys() | state.dropped.keys()) - state.evicted.keys()
        if self._sizes is None:  # the first call of this process
            clients, self._sizes = counted, {}
        for client in counted.intersection(clients):
            size = _newest_bytes(client_folder(self._folder, client), state.round)
            self._total += size - self._sizes.get(client, 0)
            self._sizes[client] = size

    def _choose(self, state: ServerState, training: set[int]) -> set[int]:
        """Return the clients to evict, and remove them from the sizes. Those in ``training`` need their states."""
        assert self._sizes is not None
        evicted: set[int] = set()
        if self._max_bytes is None or self._total <= self._max_bytes:
            return evicted
        evictable = {client for client, size in self._sizes.items() if size} - training
        for client in sorted(evictable, key=lambda client: (state.last_used_round(client), client)):
            if self._total <= self._max_bytes:
                break
            self._total -= self._sizes.pop(client)
            evicted.add(client)
        return evicted


def _newest_bytes(folder: Path, round: int) -> int:
    """Return the size of the newest versions up to ``round`` in a folder and its subfolders."""
    size = 0
    for parent, _, _ in os.walk(folder):
        versions = [version for version in saved_rounds(Path(parent), STATE_SUFFIX) if version <= round]
        size += round_file(Path(parent), versions[-1], STATE_SUFFIX).stat().st_size if versions else 0
    return size


def summarize_states(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the size of client states on disk, without the versions of earlier rounds, from lines of rounds."""
    return {
        "bytes": lines[-1].get("state_bytes", 0) if lines else 0,
        "evicted": sum(line.get("evicted_states", 0) for line in lines),
    }


def devices_limit_their_states(parts: RunParts) -> Problem:
    """Refuse a limit of the client states of devices, which have their own."""
    max_bytes = parts.settings.recording.max_state_bytes
    if not parts.context.is_deployment or max_bytes is None:
        return None
    return (
        f"client_state.max_bytes={max_bytes} is for simulations: devices keep their "
        "states themselves; set client_state.max_bytes=null"
    )


RUN_RULES = (devices_limit_their_states,)
