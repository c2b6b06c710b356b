"""Virtual time of simulated clients: when they are online, how fast they are, and how long a round takes them.

The names are those of FedScale (Lai et al., ICML 2022, arXiv 2105.11367): availability, compute speed, bandwidth. All
models are pure functions of the run's seed, the client and the round, so that no engine changes a number.
"""

from fedssl.availability.client_speed import (
    ClientSpeed,
    LogNormalSpeed,
    Speed,
    TraceSpeed,
    Workload,
    client_seconds,
    no_client_speed,
)
from fedssl.availability.models import Always, Availability, Diurnal, Trace
from fedssl.availability.online import OnlineTimes, first_time_online

__all__ = [
    "Always",
    "Availability",
    "ClientSpeed",
    "Diurnal",
    "LogNormalSpeed",
    "OnlineTimes",
    "Speed",
    "Trace",
    "TraceSpeed",
    "Workload",
    "client_seconds",
    "first_time_online",
    "no_client_speed",
]
