"""Delivery of the encoder to the devices of a run, during the run and at its end."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid

from fedssl.config.saved_run import resume_command
from fedssl.config.settings import EngineSettings
from fedssl.errors import InputError
from fedssl.fleet.certificates import load_signing_certificate, load_signing_key, sign
from fedssl.fleet.encoders import METRICS, mean_quality
from fedssl.logs import log
from fedssl.safe_io import sanitize_line
from fedssl.schedule.phases import phase_at
from fedssl.schedule.stages import set_active_stages
from fedssl.wire.delivery import EncoderDelivery, read_quality
from server_app.callbacks.base import Callback, RoundEnd, RunEnd
from server_app.federation import Federation
from server_app.fleet_file import FleetFile
from server_app.messaging import ClientMessenger
from server_app.models import arrays_by_model, export_encoders
from server_app.nodes import ClientDirectory, ClientManager
from strategies.types import ServerState

MESSAGE_TYPE = "train.encoder"
TIMEOUT = 300.0  # seconds without a reply after which the others are not waited for

Signer = Callable[[bytes], bytes]


class Delivery(Callback):
    """Exports and sends the encoders after the rounds for which it is due, and at the end.

    Each device receives the model from which it would start the next round, if that has been trained.
    """

    def __init__(
        self, grid: Grid, federation: Federation, clients: ClientManager, folder: Path, fleet: FleetFile
    ) -> None:
        self._grid, self._clients, self._folder, self._fleet = grid, clients, folder, fleet
        self._context, self._strategy = federation.context, federation.strategy.server
        self._sign, self._certificate = load_signer(federation.context.settings.engine)

    def on_round_end(self, end: RoundEnd) -> None:
        context, round = self._context, end.state.round
        every, depth = context.settings.engine.deliver_every, phase_at(context.phases, round).depth
        is_whole = depth == context.phases[-1].depth  # an exported encoder has all stages, also untrained ones
        if every and round < context.settings.rounds and round % every == 0 and is_whole:
            self._deliver(end.state)

    def on_run_end(self, end: RunEnd) -> None:
        if end.status == "finished":
            with set_active_stages(self._context.method, depth=self._context.phases[-1].depth):
                self._deliver(end.state)

    def _deliver(self, state: ServerState) -> None:
        context = self._context
        models = arrays_by_model(context, state)
        files = export_encoders(self._folder, context.method, models, context.settings, rounds=state.round)
        quality = self._send(self._clients.clients, state, files)
        if quality is not None:
            self._fleet.register_quality(quality)

    def _send(self, clients: ClientDirectory, state: ServerState, files: Mapping[str, Path]) -> dict[str, float] | None:
        """Send the encoder file of each client's model, by name of the model, and log who received it.

        Return the mean quality on the images of the devices that share it; None if they are too few.
        """
        deliveries = {model: self._delivery(model, file, round=state.round) for model, file in files.items()}
        contents = {model: delivery.to_content() for model, delivery in deliveries.items()}
        messages = []
        for client, node in clients.nodes.items():
            content = contents.get(self._strategy.starting_model(state, state.round + 1, client))
            if content is not None:
                messages.append(Message(content, node, MESSAGE_TYPE))
        names = {clients.nodes[number]: name for name, number in clients.client_ids.items() if number in clients.nodes}
        received, qualities = 0, []
        for message, reply in ClientMessenger(self._grid).send_and_receive(messages, timeout=TIMEOUT):
            name = names.get(message.metadata.dst_node_id, "")
            if reply.has_error():
                log.warning("device %s did not store the encoder: %s", name, sanitize_line(reply.error.reason))
                continue
            received += 1
            try:
                quality = read_quality(reply.content, METRICS)
            except (KeyError, ValueError) as error:
                log.warning("the quality that device %s reports is invalid: %s", name, sanitize_line(str(error)))
                continue
            if quality is not None:
                qualities.append(quality)
        found = f"{received} of {len(messages)} devices received the encoder of round {state.round}"
        if received == len(messages):
            log.info("%s", found)
        else:
            log.warning("%s; to send it again when the run has ended: %s", found, resume_command(self._folder))
        average = mean_quality(qualities)
        if average is not None:
            values = ", ".join(f"{metric} {value:.3g}" for metric, value in average.items())
            log.info("quality on local images, mean over %d devices: %s", len(qualities), values)
            average |= {"round": state.round, "devices": len(qualities)}
        return average

    def _delivery(self, model: str, file: Path, *, round: int) -> EncoderDelivery:
        unsigned = EncoderDelivery(
            run_id=self._context.settings.recording.run_id, round=round, model=model, content=file.read_bytes()
        )
        return replace(unsigned, signature=self._sign(unsigned.signed_text), certificate=self._certificate)


def load_signer(engine: EngineSettings) -> tuple[Signer, bytes]:
    """Return the function that signs, and the certificate of its key; raises `InputError`."""
    if engine.signing_key is None or engine.signing_certificate is None:
        if engine.signing_key or engine.signing_certificate:
            raise InputError("engine.signing_key and engine.signing_certificate belong together; set both or none")
        return (lambda text: b""), b""
    key = load_signing_key(Path(engine.signing_key))
    certificate = load_signing_certificate(Path(engine.signing_certificate), key)
    return (lambda text: sign(text, key)), certificate
