"""Costs of a client over a run, from the lines of ``metrics.jsonl``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CostTotals:
    """Costs of a client that takes part in every round: in each, the mean over the clients of the round."""

    memory: float | None  # peak bytes of a training step; None if not measured
    flops: float | None  # of all training steps; None if not measured
    bytes_down: float  # with base layers
    bytes_up: float
    seconds: float | None  # of training; None if clients did not report it
    round_seconds: float  # duration of all rounds, in which clients train one after another or in parallel
    virtual_seconds: float | None = None  # virtual duration of all rounds; None in wall-clock time
    base_bytes: float = 0.0  # bytes of base layers among ``bytes_down``, which a client receives once

    @property
    def communication(self) -> float:
        """Return the bytes in both directions."""
        return self.bytes_down + self.bytes_up


def sum_costs(rounds: Sequence[Mapping[str, Any]]) -> CostTotals:
    """Add up the lines of ``metrics.jsonl``."""
    costs = [line.get("cost") for line in rounds]
    seconds = [line.get("client_seconds") for line in rounds]
    measured = [cost for cost in costs if cost is not None]
    known = [value for value in seconds if value is not None]
    complete = len(measured) == len(rounds) > 0
    bytes_down, bytes_up, base_bytes = [(0.0, 0.0, 0.0), *cumulative_bytes(rounds)][-1]
    return CostTotals(
        memory=max(cost["peak_memory"] for cost in measured) if complete else None,
        flops=sum(cost["flops"] for cost in measured) if complete else None,
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        seconds=sum(known) if len(known) == len(rounds) > 0 else None,
        round_seconds=sum(line["seconds"] for line in rounds),
        virtual_seconds=rounds[-1].get("virtual_time") if rounds else None,
        base_bytes=base_bytes,
    )


def cumulative_bytes(rounds: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, float, float]]:
    """Yield, after each line of ``metrics.jsonl``, the bytes down and up of a client, and those of base layers."""
    down = up = base = 0.0
    for line in rounds:
        sent = line.get("base", {"bytes": 0, "clients": 1})
        base = max(base, sent["bytes"] / sent["clients"])
        down += (line["bytes_down"] - sent["bytes"]) / line["clients"]
        up += line["bytes_up"] / line["clients"]
        yield base + down, up, base
