"""Runs whose clients are devices: what changes in the settings, and rules about them."""

from dataclasses import replace

from fedssl.config.load import with_partition, with_values
from fedssl.config.overrides import parse
from fedssl.config.settings import DataSettings, FeatureShift, Settings
from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.rules import Problem
from server_app.nodes import ClientDirectory
from strategies.rules import RunParts


def adapt_to_edge_clients(settings: Settings, clients: ClientDirectory) -> Settings:
    """Return the settings of a run with these edge clients.

    The number of clients is that of available devices. All take part in a round unless ``clients_per_round`` is set.
    The data set is the server's, for evaluation. Without an explicit one there is none.
    """
    number = len(clients.nodes)
    per_round = number if trains_all_clients(settings) else settings.clients_per_round
    if per_round > number:
        raise InputError(
            f"clients_per_round={per_round} but {number} devices are available; lower clients_per_round, or set "
            f"num_clients={per_round} to wait for more"
        )
    if settings.calibration is not None and not settings.calibration.has_own_dataset:
        raise InputError(
            f"calibration.when={settings.calibration.when} uses a share of the clients' images, which stay on the "
            "devices; set a data set of the server's with +dataset@calibration.dataset=NAME"
        )
    if "num_clients" in _explicit_keys(settings) and number < settings.num_clients:
        log.warning(
            "%d of num_clients=%d devices are available; others take part from the round after they connect",
            number,
            settings.num_clients,
        )
    data = server_data(settings)
    measured = settings.evaluation.collapse_images if data.train else 0
    return replace(
        with_partition(with_values(settings, {"num_clients": number, "clients_per_round": per_round}), "natural"),
        data=data,
        evaluation=replace(settings.evaluation, collapse_images=measured, measure_resources=False),
    )


def trains_all_clients(settings: Settings) -> bool:
    """Return whether all available clients train in every round."""
    return "clients_per_round" not in _explicit_keys(settings) and settings.clients_per_round == settings.num_clients


def server_data(settings: Settings) -> DataSettings:
    """Return the server's data set, without splits if none was set explicitly or it has no path."""
    data = settings.data
    keys = data.reader.values
    if "dataset" not in _explicit_keys(settings) or (keys.get("path", "") is None and not keys.get("hub")):
        return replace(data, federated=None, train=None, test=None)
    return replace(data, federated=data.train)  # images of clients are not needed


def log_devices(settings: Settings, clients: ClientDirectory) -> None:
    """Log the devices and what is not measured."""
    names = {number: name for name, number in clients.client_ids.items()}
    data = settings.data
    log.info(
        "devices: %s; they train on their local images, resized to %d x %d pixels with %d channels",
        ", ".join(f"{number} {names[number]}" for number in sorted(clients.nodes)),
        *(data.size, data.size, data.channels),
    )
    if data.train is not None:
        log.info("costs are not measured: the number of images of a device is unknown")


def _explicit_keys(settings: Settings) -> set[str]:
    return {override.key_or_group for override in parse(settings.recording.overrides)}


def devices_keep_labels_and_models(parts: RunParts) -> Problem:
    """Refuse methods that need labels of devices, and to evaluate their personalized models."""
    settings = parts.settings
    if not parts.context.is_deployment:
        return None
    if parts.method.uses_labels:
        name = type(parts.method).__name__
        return f"{name} needs labels, and edge clients share no list of classes; set another method"
    if settings.evaluation.personalized or settings.unseen_clients:
        return (
            "evaluate_personalized and unseen_clients are for simulations: a device never sends its personalized "
            "model; set evaluate_personalized=false unseen_clients=0"
        )
    return None


def devices_keep_their_images(parts: RunParts) -> Problem:
    """Refuse what changes the images of simulated clients."""
    partition = parts.settings.partition
    if not parts.context.is_deployment or (partition.imbalance == 1 and partition.feature_shift == FeatureShift()):
        return None
    return (
        "imbalance and feature_shift are for simulations, and devices train on their original images; set imbalance=1 "
        "and every strength of feature_shift to 0"
    )


def devices_train(parts: RunParts) -> Problem:
    """Require a local epoch: devices would deliver the untrained encoder."""
    if not parts.context.is_deployment or parts.settings.training.epochs:
        return None
    return "local_epochs=0 is for simulations, and no device would train; set local_epochs=1 or more"


RUN_RULES = (devices_keep_labels_and_models, devices_keep_their_images, devices_train)
