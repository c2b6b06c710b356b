"""Failures that a run reports about its global model after short training."""

from pathlib import Path

from strategies.types import GLOBAL
from tests.federation import Federation

# Two clients with the same classes; a round has 14 steps of a client.
SHORT = ["num_clients=2", "strategy=fedavg", "dataset.limit=400", "batch_size=32", "local_epochs=2", "encoder.width=8"]
SHORT += ["optimizer=adam", "collapse_images=128"]


def failures_after(folder: Path, rounds: int, *overrides: str) -> tuple[str, ...]:
    """Return the failures of the global model after a number of rounds on the digits."""
    federation = Federation(folder, *SHORT, *overrides)
    layers = federation.run(rounds)
    monitor = federation.components.monitor
    report = monitor.finish({GLOBAL: layers}, used=())
    return report.failures
