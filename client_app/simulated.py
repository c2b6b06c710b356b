"""Simulated clients: they run on the machine of the user who runs the server, and accept all its requests.

No message can mark a node as simulated. The mark is an object in the node's configuration, which no command line can
write and only the engines of this project set, or the fact that this process is a Ray actor, as on Flower's simulation
runtime and never on a SuperNode. This module imports no torch, see `client_app.app`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client_app.state_store import StateStore

MARKER_KEY = "fedssl-simulation"  # key of the node's configuration


@dataclass(frozen=True)
class SimulationMarker:
    """Mark that the engines of this project set in the configuration of a node, under `MARKER_KEY`.

    ``store`` None means `client_app.state_store.FILE_STORE`. ``engine_retries`` is whether the engine runs a client
    again, without other clients, that ran out of memory.
    """

    store: "StateStore | None" = None
    engine_retries: bool = False


def is_simulated(node_config: Mapping[str, Any]) -> bool:
    """Return whether a node with this configuration is simulated."""
    if isinstance(node_config.get(MARKER_KEY), SimulationMarker):
        return True
    return node_config.keys() == {"partition-id", "num-partitions"} and _in_ray_actor()


def _in_ray_actor() -> bool:
    ray = sys.modules.get("ray")  # an actor's process has imported it
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
