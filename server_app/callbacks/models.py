"""Record snapshots and collapse metrics of the models of the server and the clients in some rounds."""

import logging
from collections.abc import Callable
from pathlib import Path

from fedssl.arrays import Layers
from fedssl.runs.snapshots import finish_round, save_layers
from server_app.callbacks.base import Callback, RoundEnd
from server_app.collapse_monitor import CollapseMonitor, summarize_health, warn_of_collapse

log = logging.getLogger("fedssl")


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
            end.health = self._monitor.finish(end.models)


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
