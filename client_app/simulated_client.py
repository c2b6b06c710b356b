"""A simulated client: its identity, and the store of its state."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_app.simulated import MARKER_KEY, SimulationMarker
from client_app.state_store import FILE_STORE, StateStore
from fedssl.runs.manifest import client_folder
from fedssl.wire.identity import NodeInfo


@dataclass(frozen=True)
class SimulatedClient:
    """A simulated client."""

    number: int  # partition id
    partitions: int
    store: StateStore = FILE_STORE
    engine_retries: bool = False  # see `client_app.simulated.SimulationMarker`

    @classmethod
    def read(cls, node_config: Mapping[str, Any]) -> "SimulatedClient":
        marker = node_config.get(MARKER_KEY, SimulationMarker())  # Flower's own runtime sets none
        return cls(
            int(node_config["partition-id"]),
            int(node_config["num-partitions"]),
            marker.store or FILE_STORE,
            marker.engine_retries,
        )

    def state_folder(self, states: Path) -> Path:
        """Return the folder of the client's state."""
        return client_folder(states, self.number)

    @property
    def node_info(self) -> NodeInfo:
        return NodeInfo(partition=self.number, partitions=self.partitions)
