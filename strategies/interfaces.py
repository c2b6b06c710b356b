"""Public names of `strategies.types`."""

from strategies.types import (
    GLOBAL,
    Aggregator,
    ClientState,
    Combination,
    CommunicationSummary,
    GlobalModel,
    LinearAggregator,
    LocalData,
    Mergeable,
    NoState,
    RoundOutcome,
    ServerState,
    TrainAgain,
)

__all__ = [
    "GLOBAL",
    "Aggregator",
    "ClientState",
    "Combination",
    "CommunicationSummary",
    "GlobalModel",
    "LinearAggregator",
    "LocalData",
    "Mergeable",
    "NoState",
    "RoundOutcome",
    "ServerState",
    "TrainAgain",
]
