"""Record checkpoints of a run, and snapshots and collapse metrics of its models."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from fedssl.arrays import Layers
from fedssl.atomic_files import fsync_file, fsync_folder, saved_rounds
from fedssl.config.settings import RecordingSettings
from fedssl.errors import RunError
from fedssl.logs import log
from fedssl.runs.snapshots import finish_round, save_layers
from server_app.callbacks.base import Callback, RoundEnd, RunEnd
from server_app.checkpoint import save_checkpoint
from server_app.client_states import ClientStates
from server_app.collapse_monitor import CollapseMonitor, summarize_health, warn_of_collapse
from server_app.run_folder import RunFolder
from strategies.types import ServerState


class Checkpoints(Callback):
    """Saves the state after rounds for which it is due, and after the last recorded one.

    The lines of a round are written before: a resumed run removes lines beyond the newest checkpoint. ``check`` raises
    `ValueError` for a state from which no run can resume.
    """

    def __init__(
        self,
        folder: RunFolder,
        states: ClientStates,
        settings: RecordingSettings,
        *,
        rounds: int,
        check: Callable[[ServerState], None],
    ) -> None:
        self._folder, self._states, self._settings, self._rounds = folder, states, settings, rounds
        self._check: Callable[[ServerState], None] | None = check
        self._state = ServerState()  # that an interrupt saves

    def on_run_start(self, state: ServerState) -> None:
        self._state = state

    def on_round_end(self, end: RoundEnd) -> None:
        if self._check is not None:  # once: a strategy of the user makes the same mistake in each round
            self._check_resumable(self._check, end.state)
            self._check = None
        self._state = end.state
        if end.state.round % self._settings.checkpoint_every == 0 or end.state.round == self._rounds:
            self.save()

    def on_run_end(self, end: RunEnd) -> None:
        """Save the last recorded state, unless a checkpoint is as new."""
        with suppress(OSError) if end.error is not None else nullcontext():  # the disk may be full
            if self._state.round > max(saved_rounds(self._folder.checkpoints), default=0):
                self.save()

    @staticmethod
    def _check_resumable(check: Callable[[ServerState], None], state: ServerState) -> None:
        try:
            check(state)
        except ValueError as error:
            raise RunError(
                f"no run can resume from the state after round {state.round}: {error}; correct the strategy, whose own "
                "states need the types model_state_type and strategy_state_type, or lower learning rates if values are "
                "not finite"
            ) from error

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


class Snapshots(Callback):
    """Saves the models of every ``every``-th round and the last one."""

    def __init__(self, folder: Path, *, every: int, rounds: int) -> None:
        self._folder, self._every, self._rounds = folder, every, rounds

    def on_round_start(self, round: int) -> None:
        self.observes = round % self._every == 0 or round == self._rounds
        self._round = round

    def on_update(self, client: int, layers: Layers) -> None:
        save_layers(self._folder, self._round, f"client-{client}", layers)

    def on_round_end(self, end: RoundEnd) -> None:
        if self.observes:
            used = [row.client for row in end.result.clients]
            finish_round(self._folder, self._round, end.models, used=used)


class Collapse(Callback):
    """Measures the models of the rounds for which ``due`` returns True."""

    def __init__(self, monitor: CollapseMonitor, *, due: Callable[[int], bool]) -> None:
        self._monitor, self._due = monitor, due

    def on_round_start(self, round: int) -> None:
        self.observes = self._due(round)

    def on_update(self, client: int, layers: Layers) -> None:
        self._monitor.observe(client, layers)

    def on_round_end(self, end: RoundEnd) -> None:
        if self.observes:
            used = [row.client for row in end.result.clients]
            end.health = self._monitor.finish(end.models, used=used)


class CollapseReports(Callback):
    """Records the measurements of a round and warns of collapse."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_round_end(self, end: RoundEnd) -> None:
        if end.health is None:
            return
        end.line["health"] = summarize_health(end.health.rows)
        end.lines["health.jsonl"] = [{"round": end.state.round, **row} for row in end.health.rows]
        warn_of_collapse(end.health.rows)
        for failure in end.health.failures:
            log.warning(failure)
        end.health.representations.save(self._folder, round=end.state.round)
