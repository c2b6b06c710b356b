"""Delivery of encoders to devices, see `server_app.delivery`."""

from pathlib import Path

from flwr.serverapp import Grid

from fedssl.schedule.stages import set_active_stages
from server_app.build import RunComponents
from server_app.callbacks.base import Callback, RoundEnd, RunEnd
from server_app.delivery import EncoderSender
from server_app.fleet_file import FleetFile
from server_app.models import arrays_by_model, export_encoders
from server_app.nodes import ClientManager
from strategies.types import ServerState


class Delivery(Callback):
    """Exports and sends the encoders after the rounds for which it is due, and at the end."""

    def __init__(
        self, grid: Grid, components: RunComponents, clients: ClientManager, folder: Path, fleet: FleetFile
    ) -> None:
        self._grid, self._components, self._clients = grid, components, clients
        self._folder, self._fleet = folder, fleet
        self._sender = EncoderSender(components.settings)

    def on_round_end(self, end: RoundEnd) -> None:
        if self._sender.due(end.state.round):
            self._deliver(end.state)

    def on_run_end(self, end: RunEnd) -> None:
        if end.status == "finished":
            with set_active_stages(self._components.method, depth=self._components.context.phases[-1].depth):
                self._deliver(end.state)

    def _deliver(self, state: ServerState) -> None:
        components = self._components
        models = arrays_by_model(components.context, state)
        files = export_encoders(self._folder, components.method, models, components.settings, rounds=state.round)
        quality = self._sender.send(self._grid, self._clients.clients, state, files)
        if quality is not None:
            self._fleet.register_quality(quality)
