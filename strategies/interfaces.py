"""Public names of `strategies.types`, under the name that scripts import."""

from strategies.types import (
    GLOBAL,
    AggregatedModel,
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
    model_suffix,
)

__all__ = [
    "GLOBAL",
    "AggregatedModel",
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
    "model_suffix",
]
