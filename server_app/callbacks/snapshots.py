"""Snapshots: the models of the server and the clients in some rounds."""

from pathlib import Path

from fedssl.arrays import Layers
from fedssl.runs.snapshots import finish_round, save_layers
from server_app.callbacks.base import Callback, RoundEnd


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
