"""Devices in this process: nodes with a configuration of their own and nothing of a simulation, and their images."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from PIL import Image

from client_app import handlers
from fedssl.flower_internals import RUN_ID, set_task_identity
from server_app import nodes
from server_app.app import app as server_app
from simulation.grid import LocalGrid

nodes.DISCOVERY_GRACE_SECONDS = 0.0  # all devices are there from the start
FORM = ["dataset=folder", "dataset.size=8", "dataset.channels=1", "dataset.mean=[0.4]", "dataset.std=[0.3]"]
SMALL = [*FORM, "local_epochs=1", "encoder.width=4", "threads=1", "batch_size=8", "device=cpu", "evaluation=none"]
SMALL += ["final_evaluation=none", "collapse_images=0", "measure_resources=false"]


def write_images(folder: Path, number: int, *, seed: int = 0, size: int = 8) -> Path:
    """A folder of random grey images; returns it."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for place in range(number):
        Image.fromarray(random.integers(256, size=(size, size), dtype=np.uint8)).save(folder / f"{place:02}.png")
    return folder


def write_places(folder: Path, owners: str = "abc") -> list[Path]:
    """Write 9, 10, 11 and more other images for the owners; return their folders."""
    return [write_images(folder / name, 9 + place, seed=place) for place, name in enumerate(owners)]


def context(**node_config) -> Context:
    """Of a node with this configuration; _ stands for - in its keys."""
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in node_config.items()}
    config = {key.replace("_", "-"): value for key, value in plain.items()}
    return Context(run_id=RUN_ID, node_id=2, node_config=config, state=RecordDict(), run_config={})


def ask(content: RecordDict, device: Context, kind: str = "train") -> Message:
    """Return the reply of a device's ClientApp, handled in this process."""
    set_task_identity()
    return handlers.handle(Message(content, 2, kind), device)


def run_server_app(grid: Grid, overrides: Sequence[str]) -> None:
    """Run the ServerApp as Flower's runtime does, with overrides in its run config."""
    run_config = {"overrides": shlex.join(overrides)}
    server_app(grid, Context(run_id=RUN_ID, node_id=1, node_config={}, state=RecordDict(), run_config=run_config))


class Devices(LocalGrid):
    """The local engine's grid, whose nodes are devices with these configurations."""

    partition_nodes = None  # devices have to be asked

    def __init__(self, *contexts: Context, handle: ClientApp = handlers.handle) -> None:
        super().__init__(handle, num_clients=len(contexts))
        self._contexts = dict(zip(self.get_node_ids(), contexts, strict=True))
