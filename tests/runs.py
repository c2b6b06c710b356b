"""Runs that take a second, and what their folders say."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from server_app.checkpoint import latest_checkpoint

SMALL = ["num_clients=2", "rounds=3", "local_epochs=1", "dataset.limit=24", "dataset.test_limit=12", "encoder.width=2"]
SMALL += ["threads=1", "partition=iid", "collapse_images=0", "measure_resources=false", "augmentation=none"]
SMALL += ["batch_size=8"]
UNTESTED = ["evaluate_every=0", "final_evaluation=none"]
KNN = ["evaluate_every=1", "final_evaluation=knn"]


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def write_run(folder: Path, overrides: Iterable[str], *, status: str = "finished", **more: Any) -> Path:
    """Create the folder of a run with its summary; ``more`` are further keys."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"status": status, "reason": None, "overrides": list(overrides), **more}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def change_summary(folder: Path, **changes: Any) -> None:
    """Replace values in the summary of a run."""
    (folder / "summary.json").write_text(json.dumps(read_summary(folder) | changes))


def write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append lines of JSON to a file."""
    with file.open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)


def ending(folder: Path) -> tuple[str, int, str | None]:
    """Return the status of the run, its rounds, and why it ended."""
    summary = read_summary(folder)
    return summary["status"], summary["rounds"], summary["reason"]


def model_bits(folder: Path) -> list[tuple[str, str, bytes]]:
    """Return model, name and bits of all layers of the newest checkpoint."""
    state = latest_checkpoint(folder / "checkpoints")
    models = [(name, state.models[name]) for name in state.model_names()]
    return [(model, name, array.tobytes()) for model, one in models for name, array in one.layers.items()]


def flip_bit(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
