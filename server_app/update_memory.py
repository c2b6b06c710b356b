"""Checks before the first round: the updates of a round, and the models of single clients, must fit."""

import shutil
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from fedssl.arrays import Layers
from fedssl.errors import InputError
from fedssl.machine.memory import available_memory, gigabytes
from server_app.federation import Federation
from strategies.base import ServerStrategy
from strategies.types import ServerState
from strategies.update_store import CollectingAggregator, memory_budget

DISK_SHARE = 0.9  # of the free disk, so that checkpoints can be written


@dataclass(frozen=True, kw_only=True)
class StoredUpdates:
    """Updates that a round stores: ``copies`` of each, with ``model_bytes``; one of them in ``aggregator``, if any."""

    model_bytes: int
    copies: int
    aggregator: CollectingAggregator | None
    layers: Layers

    def working_memory(self, number: int) -> int:
        """Return the bytes that the aggregation of this number of updates needs besides them."""
        return self.aggregator.working_memory(self.layers, number) if self.aggregator else 0

    def largest_number(self, *, budget: int, available: int | None, disk: int) -> int:
        """Return the largest number of updates that fit; ``budget`` is the part of ``available`` memory for updates."""
        if not self.copies:
            return 2**31
        number = (budget + disk) // (self.copies * self.model_bytes)
        if available is None:
            return number
        return bisect_right(range(1, number + 1), available - budget, key=self.working_memory)  # grows with the number


def stored_updates(server: ServerStrategy, layers: Layers, *, rounds: int, filters_norms: bool) -> StoredUpdates:
    """Return what a round stores at most. ``layers`` are those of an update."""
    aggregator = server.aggregator(1)
    clusters = any(server.models_to_cluster(ServerState(), round) for round in range(1, rounds + 1))
    collects = isinstance(aggregator, CollectingAggregator)
    return StoredUpdates(
        model_bytes=sum(array.nbytes for array in layers.values()),
        copies=collects + (clusters or filters_norms) + clusters,  # the updates, and their differences
        aggregator=aggregator if isinstance(aggregator, CollectingAggregator) else None,
        layers=layers,
    )


def check_updates_fit(federation: Federation, layers: Layers) -> None:
    """Raise `InputError` if the updates of a round fit neither into memory nor on the disk of its folder."""
    run, settings = federation.settings, federation.settings.aggregation
    filters_norms = settings.max_norm_ratio is not None
    stored = stored_updates(federation.strategy.server, layers, rounds=run.rounds, filters_norms=filters_norms)
    number = min(federation.clients_per_round + settings.over_selection, len(federation.nodes))
    existing, disk = _usable_disk(run.recording.folder or Path.cwd())
    budget, available = memory_budget(), available_memory()
    largest = stored.largest_number(budget=budget, available=available, disk=disk)
    if number <= largest:
        return
    keeps = (
        f"strategy={run.recording.choices['strategy']}"
        if settings.max_norm_ratio is None
        else "aggregation.max_norm_ratio"
    )
    remedies = [f"set clients_per_round={largest - settings.over_selection}"] * (largest > settings.over_selection)
    remedies += ["aggregation.max_norm_ratio=null"] * (settings.max_norm_ratio is not None)
    remedies += ["strategy=fedavg, which stores none, or output_dir to a disk with more space"]
    needed = stored.copies * number * stored.model_bytes
    raise InputError(
        f"{keeps} stores the updates of a round, and {number} of them need {gigabytes(needed)} and "
        f"{gigabytes(stored.working_memory(number))} of memory to aggregate them, but {gigabytes(budget)} of memory "
        f"and {gigabytes(disk)} in {existing} are available; {', or '.join(remedies)}"
    )


def check_models_fit(federation: Federation, layers: Layers) -> None:
    """Raise `InputError` if a strategy has a model for each client and the models do not fit.

    All are on the disk. In memory are the model and the message of each participant of a round.
    """
    if not federation.strategy.server.models_per_client:
        return
    settings, per_round = federation.settings, federation.clients_per_round
    strategy = settings.recording.choices["strategy"]
    model_bytes = sum(array.nbytes for array in layers.values())
    available, in_round = available_memory(), 2 * per_round * model_bytes
    if available is not None and in_round > available:
        raise InputError(
            f"strategy={strategy} has a model for each client, and those of clients_per_round="
            f"{per_round} need {gigabytes(in_round)} of memory, but {gigabytes(available)} are "
            f"available; set clients_per_round={max(1, available // (2 * model_bytes))}"
        )
    number = min(len(federation.nodes) - len(federation.untrained_clients), settings.rounds * per_round)
    needed = number * model_bytes
    existing, disk = _usable_disk(settings.recording.folder or Path.cwd())
    if needed > disk:
        raise InputError(
            f"strategy={strategy} writes a model of each of up to {number} clients, {gigabytes(needed)}, but "
            f"{gigabytes(disk)} in {existing} are available; set output_dir to a disk with more space, or lower "
            "clients_per_round, rounds or num_clients"
        )


def _usable_disk(folder: Path) -> tuple[Path, int]:
    """Return the existing part of a path, and the usable bytes on its disk."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return existing, int(DISK_SHARE * shutil.disk_usage(existing).free)
