"""TensorBoard: events in ``tensorboard/`` of the run folder."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from server_app.trackers.base import TrackedRun, missing_package

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Logs scalars per round, the settings as text, and the final results as scalars of the last round."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("tensorboard", "tensorboard") from error
        self._make = SummaryWriter

    def begin(self, run: TrackedRun) -> None:
        """Open the event file. Events of rounds that a resumed run repeats are purged."""
        self._writer: SummaryWriter = self._make(str(run.folder / "tensorboard"), purge_step=run.done + 1)
        lines = "\n".join(f"    {key}: {json.dumps(value)}" for key, value in run.settings.items())
        self._writer.add_text("settings", lines, run.done)

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, round)
        self._writer.flush()

    def end(self, status: str, *, round: int, final: Mapping[str, float]) -> None:
        self.round(round, final)
        self._writer.close()
