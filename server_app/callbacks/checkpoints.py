"""Checkpoints of a run, from which it resumes."""

from contextlib import nullcontext, suppress

from fedssl.atomic_files import fsync_file, fsync_folder, saved_rounds
from fedssl.config.settings import RecordingSettings
from server_app.callbacks.base import Callback, RoundEnd, RunEnd
from server_app.checkpoint import save_checkpoint
from server_app.client_states import ClientStates
from server_app.run_folder import RunFolder
from strategies.types import ServerState


class Checkpoints(Callback):
    """Saves the state after rounds for which it is due, and after the last recorded one.

    The lines of a round are written before: a resumed run removes lines beyond the newest checkpoint.
    """

    def __init__(self, folder: RunFolder, states: ClientStates, settings: RecordingSettings, *, rounds: int) -> None:
        self._folder, self._states, self._settings, self._rounds = folder, states, settings, rounds
        self._state = ServerState()  # that an interrupt saves

    def on_run_start(self, state: ServerState) -> None:
        self._state = state

    def on_round_end(self, end: RoundEnd) -> None:
        self._state = end.state
        if end.state.round % self._settings.checkpoint_every == 0 or end.state.round == self._rounds:
            self.save()

    def on_run_end(self, end: RunEnd) -> None:
        """Save the last recorded state, unless a checkpoint is as new."""
        with suppress(OSError) if end.error is not None else nullcontext():  # the disk may be full
            if self._state.round > max(saved_rounds(self._folder.checkpoints), default=0):
                self.save()

    def save(self) -> None:
        state, folder = self._state, self._folder
        for lines in folder.lines.values():  # the lines of a checkpoint's rounds must be on the disk as well
            fsync_file(lines.file)
        fsync_folder(folder.path)  # and so must their names
        save_checkpoint(
            folder.checkpoints,
            state,
            keep=self._settings.keep_checkpoints,
            parts=[*(lines.part(state.round) for lines in folder.lines.values()), *self._states.parts(state)],
            recoveries=folder.recoveries,
        )
