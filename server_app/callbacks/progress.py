"""The progress of a run on the console."""

import logging

from server_app.callbacks.base import Callback, RoundEnd
from server_app.console import PlainConsole, ProgressTracker
from strategies.types import ServerState

log = logging.getLogger("fedssl")


class Progress(Callback):
    """Logs a line per round and shows the progress on the screen."""

    def __init__(self, screen: PlainConsole, *, rounds: int) -> None:
        self._screen, self._progress = screen, ProgressTracker(rounds)

    def on_run_start(self, state: ServerState) -> None:
        self._screen.set_completed(state.round)

    def on_round_end(self, end: RoundEnd) -> None:
        snapshot = self._progress.after(end.line, end.evaluation)
        log.info(snapshot.log_line)
        self._screen.show(snapshot)
