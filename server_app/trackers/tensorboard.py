"""TensorBoard: events in ``tensorboard/`` of the run folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedssl.atomic_files import atomic_write
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
        """Open a new event file. Events that a resumed run repeats are removed, also from a TensorBoard at work."""
        folder = run.folder / "tensorboard"
        for file in folder.glob("events.out.tfevents.*"):
            _remove_repeated(file, done=run.done)
        self._writer: SummaryWriter = self._make(str(folder), purge_step=run.done + 1)
        lines = "\n".join(f"    {key}: {json.dumps(value)}" for key, value in run.settings.items())
        self._writer.add_text("settings", lines, run.done)

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, round)
        self._writer.flush()

    def end(self, status: str, *, round: int, final: Mapping[str, float]) -> None:
        self.round(round, final)
        self._writer.close()


def _remove_repeated(file: Path, *, done: int) -> None:
    """Remove the events of rounds after ``done``, and of final results: other readers than TensorBoard purge none."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    events = [Event.FromString(record) for record in RawEventFileLoader(str(file)).Load()]
    finals = [event for event in events if any(value.tag.startswith("final/") for value in event.summary.value)]
    kept = [event.SerializeToString() for event in events if event.step <= done and event not in finals]
    atomic_write(file, lambda stream: [RecordWriter(stream).write(record) for record in kept])
