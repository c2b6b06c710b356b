"""Validation of settings against each other, the data and the federation, before the first round."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from fedssl.config.load import with_partition, with_values
from fedssl.config.overrides import parse
from fedssl.config.settings import DataSettings, Settings
from fedssl.datasets.base import ImageData
from fedssl.errors import InputError
from fedssl.evaluation.early_stopping import check_monitor, check_threshold_unit
from fedssl.evaluation.protocol import evaluation_problem
from fedssl.evaluation.scores import ACCURACY
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer
from fedssl.schedule.phases import Phase
from server_app.nodes import ClientDirectory
from server_app.plans import PlanBuilder
from server_app.round_context import RoundContext
from server_app.secure_aggregation import validate_graph
from strategies.base import FedSSLStrategy
from strategies.l_dawa import LDAWAScalingClient
from strategies.low_rank_aggregation import CHANGING_WEIGHTS, OF_PRODUCTS, REPLACING_FACTORS
from strategies.server_optimizer import ServerOptimizer
from strategies.types import GLOBAL, Aggregator, LinearAggregator
from strategies.weighted_sum import WeightedSum

log = logging.getLogger("fedssl")

_MAX_LISTED = 8  # clients in a warning

# Why nothing is evaluated.
NO_SERVER_DATA = (
    "the server has no images, so collapse metrics and costs are not measured either; set a labeled data set of the "
    "server with dataset=NAME dataset.path=FOLDER"
)


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


def validate_batch_size(settings: Settings, method: SSLMethod) -> None:
    """Refuse batches that are too small for the method; raises `InputError`."""
    batch_size, smallest = settings.training.batch_size, method.min_batch_size
    if batch_size < smallest:
        raise InputError(
            f"batch_size={batch_size} but {type(method).__name__} needs batches of at least {smallest} images; "
            f"set batch_size={smallest} or more, better 64"
        )


def validate_compilation(settings: Settings, method: SSLMethod) -> None:
    """Refuse to compile an encoder whose ``forward`` is not used in training; raises `InputError`."""
    if settings.machine.compile_encoder and method.masks_patches and "encoder" not in method.regularized_parts:
        raise InputError(
            f"compile=true compiles the encoder for whole images, but {type(method).__name__} trains it on patches; "
            "set compile=false"
        )


def validate_regularizer(regularizer: Regularizer, phases: Sequence[Phase]) -> None:
    """Refuse a schedule that freezes trained stages whose input the regularizer needs; raises `InputError`."""
    if len(phases) > 1 and any(phase.frozen for phase in phases) and not regularizer.supports_frozen_stages:
        raise InputError(
            f"{type(regularizer).__name__} compares representations of images, but the schedule freezes trained stages "
            "and trains on their output; set schedule=end_to_end or schedule=progressive, or another regularizer"
        )


def clients_with_few_images(settings: Settings, parts: Sequence[np.ndarray], method: SSLMethod) -> frozenset[int]:
    """Return the clients with too few images for training, and log them.

    Raises `InputError` if the others are too few for a round.
    """
    smallest, needed = method.min_batch_size, settings.aggregation.min_updates
    few = np.flatnonzero(np.fromiter(map(len, parts), np.int64, len(parts)) < smallest).tolist()
    num_others = len(set(range(len(parts) - settings.unseen_clients)).difference(few))
    if num_others < needed:
        raise InputError(
            f"{num_others or 'no'} client{'s have' if num_others > 1 else ' has'} the {smallest} images that "
            f"{type(method).__name__} needs, and aggregation.min_updates={needed}; lower num_clients={len(parts)}, or "
            "choose another partition"
        )
    if few:
        listed = ", ".join(map(str, few[:_MAX_LISTED])) + (", ..." if len(few) > _MAX_LISTED else "")
        log.warning(
            "%d of %d clients never train, since %s needs at least %d images: %s",
            *(len(few), len(parts), type(method).__name__, smallest, listed),
        )
    return frozenset(few)


def validate_aggregation(settings: Settings, *, is_deployment: bool) -> None:
    """Refuse settings of the aggregation that conflict with each other; raises `InputError`."""
    aggregation, per_round, clients = settings.aggregation, settings.clients_per_round, settings.num_clients
    if aggregation.min_updates > per_round:
        raise InputError(
            f"aggregation.min_updates={aggregation.min_updates} but clients_per_round={per_round}; lower the first "
            "or raise the second"
        )
    if not is_deployment and per_round + aggregation.over_selection > clients:
        raise InputError(
            f"aggregation.over_selection={aggregation.over_selection} but clients_per_round={per_round} leaves "
            f"{clients - per_round} of num_clients={clients}; lower one of them"
        )
    if settings.secure_aggregation and (
        settings.privacy or aggregation.buffered or aggregation.max_norm_ratio is not None
    ):
        raise InputError(
            "secure_aggregation=secagg_plus reveals only the sum of updates; set privacy=none "
            "aggregation.buffered=false aggregation.max_norm_ratio=null, which need single updates"
        )
    if settings.secure_aggregation:
        validate_graph(settings.secure_aggregation, per_round + aggregation.over_selection)
    if settings.secure_aggregation and settings.recording.snapshot_every:
        raise InputError("secure_aggregation=secagg_plus reveals no client's model; set snapshot_every=0")
    if settings.privacy and settings.recording.snapshot_every:
        raise InputError(
            "privacy=central hides the contribution of a client, which snapshots reveal; set snapshot_every=0"
        )
    if aggregation.buffered and aggregation.over_selection:
        raise InputError(
            "aggregation.buffered=true waits for aggregation.min_updates; set aggregation.over_selection=0"
        )


def low_rank_aggregation(settings: Settings) -> str:
    """Return what becomes of LoRA's products, see `strategies.low_rank_aggregation`; "factors" without LoRA."""
    return str(settings.model.tuning.values.get("aggregation", "factors"))


def client_ranks(settings: Settings) -> tuple[int, ...]:
    """Return the ranks of LoRA's factors that clients exchange, in turn; empty if all have that of the model."""
    return tuple(settings.model.tuning.values.get("ranks") or ())


def validate_low_rank_aggregation(
    settings: Settings, method: SSLMethod, strategy: FedSSLStrategy, server_optimizer: ServerOptimizer
) -> None:
    """Refuse what an aggregation of LoRA's products does not support; raises `InputError`."""
    aggregation, others = (
        low_rank_aggregation(settings),
        "set tuning.aggregation=factors or tuning.aggregation=freeze_a",
    )
    if client_ranks(settings) and aggregation not in REPLACING_FACTORS:
        raise InputError(
            f"tuning.ranks={list(client_ranks(settings))} needs an aggregation of products of different ranks; set "
            "tuning.aggregation=svd or stack, or tuning.ranks=null"
        )
    if aggregation not in OF_PRODUCTS:
        return
    of_sums = {
        "privacy=central": settings.privacy is not None,
        "secure_aggregation=secagg_plus": settings.secure_aggregation is not None,
        "server_optimizer": server_optimizer.is_active,
        "aggregation.buffered=true": settings.aggregation.buffered,
    }
    for setting in (setting for setting, given in of_sums.items() if given):
        raise InputError(
            f"{setting} needs sums of layers, which tuning.aggregation={aggregation} replaces by products; {others}"
        )
    name, aggregator = settings.recording.choices["strategy"], strategy.server.aggregator(settings.rounds)
    if not isinstance(aggregator, LinearAggregator):
        raise InputError(
            f"strategy={name} is no weighted sum of the clients, which tuning.aggregation={aggregation} needs; {others}"
        )
    if aggregation not in CHANGING_WEIGHTS:
        return
    if strategy.client.starts_from_own_layers:
        raise InputError(
            f"clients of strategy={name} start from factors of their own, which do not fit the weights that "
            f"tuning.aggregation={aggregation} changes; set tuning.aggregation=svd, factors or freeze_a"
        )
    if method.target_init == "average" or (aggregation == "stack" and method.target_init == "persist"):
        raise InputError(
            f"method.target_init={method.target_init} keeps factors of target networks, which do not fit the weights "
            f"that tuning.aggregation={aggregation} changes; set method.target_init=reset, or tuning.aggregation=svd"
        )
    scales = isinstance(aggregator, WeightedSum) and aggregator.scale != "none"
    if aggregation == "stack" and (scales or isinstance(strategy.client, LDAWAScalingClient)):
        raise InputError(
            f"strategy={name} compares clients with the global product, which tuning.aggregation=stack resets to zero "
            "in every round; set tuning.aggregation=exact or svd"
        )


def validate_edge_method(method: SSLMethod) -> None:
    """Refuse methods that need labels with edge clients; raises `InputError`."""
    if method.uses_labels:
        raise InputError(
            f"{type(method).__name__} needs labels, and edge clients share no list of classes; set another method"
        )


def forbid_personalized_evaluation(settings: Settings) -> None:
    """Refuse personalized evaluation with edge clients; raises `InputError`."""
    if settings.evaluation.personalized or settings.unseen_clients:
        raise InputError(
            "evaluate_personalized and unseen_clients are for simulations: a device never sends its personalized "
            "model; set evaluate_personalized=false unseen_clients=0"
        )


def forbid_state_limit(settings: Settings) -> None:
    """Refuse a limit of client states with edge clients, which have their own; raises `InputError`."""
    if settings.recording.max_state_bytes is not None:
        raise InputError(
            f"client_state.max_bytes={settings.recording.max_state_bytes} is for simulations: devices keep their "
            "states themselves; set client_state.max_bytes=null"
        )


def validate_personalized_evaluation(settings: Settings, image_data: ImageData) -> None:
    """Refuse personalized evaluation without labels; raises `InputError`."""
    problem = evaluation_problem(settings.data)
    if settings.evaluation.personalized and (problem or image_data.labels is None):
        raise InputError(f"evaluate_personalized=true needs labels; {problem or 'the images of the clients have none'}")


def validate_early_stopping(
    settings: Settings, method: SSLMethod, *, result_units: Mapping[str, str], phases: int
) -> None:
    """Refuse to stop by a result that no round has, or before all stages are trained; raises `InputError`.

    ``result_units`` are the units of the results of a round, by name.
    """
    rule = settings.evaluation.early_stopping
    if rule.monitor is None:
        return
    if phases > 1:
        raise InputError(
            f"early_stopping.monitor={rule.monitor} would stop a schedule of {phases} stages before its last; set "
            "early_stopping.monitor=null or schedule=end_to_end"
        )
    problem = evaluation_problem(settings.data)
    if problem:
        raise InputError(f"early_stopping.monitor={rule.monitor} needs evaluations; {problem}")
    units = {**result_units, **({"classifier": ACCURACY} if method.uses_labels else {})}
    check_monitor(rule, units)
    check_threshold_unit(rule, units[rule.monitor])


def require_full_exchange(what: str, context: RoundContext, plans: PlanBuilder, *, models: Iterable[str]) -> None:
    """Require one global model that all clients download and upload completely; raises `InputError`."""
    slots = plans.slots.values()
    names = {*chain.from_iterable(slot.candidates for slot in slots), *models}
    start = next(iter(plans.starts.values()))
    complete = all(slot.downloaded == tuple(start.trainable) for slot in slots)
    if not (names <= {GLOBAL} and complete and start.upload_names is None and len(context.phases) == 1):
        raise InputError(
            f"{what} needs clients that all send and receive the whole model, but the strategy or "
            "the schedule exchanges parts of it or several models; leave it out"
        )


def validate_sums(settings: Settings, method: SSLMethod, strategy: FedSSLStrategy) -> None:
    """Refuse strategies and methods whose updates privacy or secure aggregation cannot sum; raises `InputError`."""
    known = {
        "privacy=central": ("uniform",) if settings.privacy else (),
        "secure_aggregation=secagg_plus": ("uniform", "examples") if settings.secure_aggregation else (),
    }
    for what, weightings in known.items():
        if not weightings:
            continue
        for round in (1, settings.rounds):  # a strategy may have a warm-up
            problem = _why_no_sum(strategy.server.aggregator(round), weightings)
            if problem:
                raise InputError(
                    f"{what} needs a strategy that adds up the clients, but strategy="
                    f"{settings.recording.choices['strategy']} {problem}: set strategy=fedavg "
                    "strategy.weighting=uniform, or strategy=l_dawa strategy.scale_at=client"
                )
        if method.uploaded_parts:
            raise InputError(
                f"{what} does not cover the parts that {type(method).__name__} uploads; set another method"
            )


def _why_no_sum(aggregator: Aggregator, weightings: Sequence[str]) -> str | None:
    """Return why an aggregator is no sum with one of the weightings; None if it is."""
    if not isinstance(aggregator, WeightedSum) or aggregator.scale != "none":
        return "compares or selects them on the server"
    if aggregator.weighting in weightings:
        return None
    return {
        "examples": "weights them by their numbers of images, so that the influence of one is not bounded",
        "loss": "weights them by their losses relative to the smallest of the round, which no client knows",
    }[aggregator.weighting]
