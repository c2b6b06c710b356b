"""A run with devices: what of its settings the devices decide, and what a server without images does without."""

import logging
from dataclasses import replace

from fedssl.config.load import with_clients
from fedssl.config.overrides import parse
from fedssl.config.settings import DataSettings, Settings
from fedssl.errors import InputError
from server_app.nodes import ClientDirectory

log = logging.getLogger("fedssl")

# Why nothing is evaluated.
NO_SERVER_DATA = (
    "the server has no images, so that health and costs are not measured either; name a labelled set of its own with "
    "dataset=NAME dataset.path=PLACE"
)


def adapt_to_edge_clients(settings: Settings, clients: ClientDirectory) -> Settings:
    """The settings of a run whose clients are these devices.

    There are as many clients as devices that are there, and all take part in a round unless ``clients_per_round`` says
    how many. The data set is the server's own, for evaluation; if none was chosen there is none.

    Raises
    ------
    InputError
        Fewer devices are there than are to train in a round, or calibration has no images.
    """
    number, explicit = len(clients.nodes), _explicit_keys(settings)
    of_all = "clients_per_round" not in explicit and settings.clients_per_round == settings.num_clients
    per_round = number if of_all else settings.clients_per_round
    if per_round > number:
        raise InputError(
            f"clients_per_round={per_round} but {number} devices are there; lower clients_per_round, or set "
            f"num_clients={per_round} to wait for so many"
        )
    if settings.calibration is not None and not settings.calibration.has_own_dataset:
        raise InputError(
            f"calibration.when={settings.calibration.when} takes a share of the clients' images, which are on the "
            "devices; name a data set of the server's with +dataset@calibration.dataset=NAME"
        )
    data = server_data(settings)
    measured = settings.evaluation.collapse_images if data.train else 0
    return replace(
        with_clients(settings, number, per_round=per_round),
        data=data,
        evaluation=replace(settings.evaluation, collapse_images=measured, measure_resources=False),
    )


def server_data(settings: Settings) -> DataSettings:
    """The server's labelled images; without splits if no data set was chosen, or one without a place."""
    data = settings.data
    keys = data.reader.values
    if "dataset" not in _explicit_keys(settings) or (keys.get("path", "") is None and not keys.get("hub")):
        return replace(data, federated=None, train=None, test=None)
    return replace(data, federated=data.train)  # what clients would share is not needed


def log_devices(settings: Settings, clients: ClientDirectory) -> None:
    """Tell people which devices there are, and what is not measured."""
    known = {number: name for name, number in clients.client_ids.items()}
    data = settings.data
    log.info(
        "devices: %s; they train on their own images, brought to %d x %d pixels in %d channels",
        ", ".join(f"{number} {known[number]}" for number in sorted(clients.nodes)),
        *(data.size, data.size, data.channels),
    )
    if data.train is not None:
        log.info("costs are not measured: how many images devices have is not known")


def _explicit_keys(settings: Settings) -> set[str]:
    """Keys that the user's words have."""
    return {override.key_or_group for override in parse(settings.recording.overrides)}
