"""Experiment trackers: where numbers of rounds go beside the run folder's own files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedssl.errors import InputError

Tracker = Callable[[int, Mapping[str, Any]], None]  # takes a round and its line of ``metrics.jsonl``


def make_tracker(name: str, folder: Path) -> Tracker:
    """Make the tracker of this name, ``none`` or ``tensorboard``, which may write into the run folder.

    Raises
    ------
    InputError
        There is no such tracker, or what it needs is not installed.
    """
    if name == "none":
        return lambda round, line: None
    if name != "tensorboard":
        raise InputError(f"tracker.name={name} is unknown; set tracker=none or tracker=tensorboard")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "tracker=tensorboard needs TensorBoard; install it: uv sync --extra tensorboard, or pip install tensorboard"
        ) from error
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(round: int, line: Mapping[str, Any]) -> None:
        values = {**line, **line.get("evaluation", {})}
        for key, value in values.items():
            if isinstance(value, int | float) and key != "round":
                writer.add_scalar(key, value, round)
        writer.flush()

    return write
