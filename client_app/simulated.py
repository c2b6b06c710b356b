"""A client of a simulation: it runs on the machine of whoever runs the server, and does what the server says.

What says that this is a simulation can come in no message: an object in the node's configuration, which no command
line can write and only the engines of this project put there, or that this process is an actor of Ray, as it is on
Flower's simulation runtime and never on a SuperNode.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from client_app.state_store import FILE_STORE, StateStore
from fedssl.wire.messages import NodeInfo

MARKER_KEY = "fedssl-simulation"  # key of the node's configuration


@dataclass(frozen=True)
class SimulationMarker:
    """What the engines of this project put into the configuration of a node, under `MARKER_KEY`.

    Attributes
    ----------
    store : StateStore
        Where clients have what they keep.
    """

    store: StateStore = FILE_STORE


def is_simulated(node_config: Mapping[str, Any]) -> bool:
    """Whether a node with this configuration is one of a simulation."""
    if isinstance(node_config.get(MARKER_KEY), SimulationMarker):
        return True
    return node_config.keys() == {"partition-id", "num-partitions"} and _in_ray_actor()


def _in_ray_actor() -> bool:
    ray = sys.modules.get("ray")  # who runs in an actor of it has imported it
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


@dataclass(frozen=True)
class SimulatedClient:
    """One of the clients of a simulation.

    Attributes
    ----------
    number : int
        Its partition.
    partitions : int
        How many there are.
    store : StateStore
        Where it has what it keeps.
    """

    number: int
    partitions: int
    store: StateStore = FILE_STORE

    @classmethod
    def read(cls, node_config: Mapping[str, Any]) -> "SimulatedClient":
        """The client that the node's configuration names."""
        marker = node_config.get(MARKER_KEY, SimulationMarker())  # under Flower's own runtime there is none
        return cls(int(node_config["partition-id"]), int(node_config["num-partitions"]), marker.store)

    @property
    def name(self) -> str:
        """Of its folder."""
        return str(self.number)

    @property
    def node_info(self) -> NodeInfo:
        """What it answers when it is asked."""
        return NodeInfo(partition=self.number, partitions=self.partitions)
