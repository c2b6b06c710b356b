"""The experiment tracker of a run."""

from fedssl.config.settings import RecordingSettings
from server_app.callbacks.base import Callback, RoundEnd
from server_app.trackers.base import SafeTracker
from strategies.types import ServerState


class Tracking(Callback):
    """Logs the settings and the rounds of a run in its tracker."""

    def __init__(self, tracker: SafeTracker, settings: RecordingSettings) -> None:
        self._tracker, self._settings = tracker, settings

    def on_run_start(self, state: ServerState) -> None:
        self._tracker.begin(self._settings, done=state.round)

    def on_round_end(self, end: RoundEnd) -> None:
        self._tracker.round(end.line)
