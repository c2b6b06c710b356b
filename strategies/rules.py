"""The arguments of rules about a built run and about a round, and rules that several features share."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from fedssl.config.settings import Settings
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer
from fedssl.rules import Problem, Rule
from fedssl.wire.messages import TRAIN_LOSS
from strategies.base import FedSSLStrategy
from strategies.run_context import RunContext
from strategies.types import GLOBAL, Aggregator
from strategies.weighted_sum import WeightedSum


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Parts of a built run, before its images are read."""

    context: RunContext
    strategy: FedSSLStrategy
    regularizer: Regularizer
    # Read the images when they are called: whether those of the clients have labels, and the units of the results of a
    # round by name. The second is None if the server's images cannot be read here.
    has_labels: Callable[[], bool]
    result_units: Callable[[], Mapping[str, str]] | None

    @property
    def settings(self) -> Settings:
        return self.context.settings

    @property
    def method(self) -> SSLMethod:
        return self.context.method


@dataclass(frozen=True, kw_only=True)
class RoundExchange:
    """Models and layers that the clients of a round exchange."""

    models: Collection[str]  # names of those that clients start from, and that the round changes
    is_complete: bool  # every client downloads and uploads all layers, and no phase of a schedule leaves any out


def strategy_supports_run(parts: RunParts) -> Problem:
    """Refuse what the algorithm does not support."""
    return parts.strategy.problem(parts.context)


def weights_by_loss_have_losses(parts: RunParts) -> Problem:
    """Refuse weights by losses of a training that has none, whatever the strategy."""
    settings, server = parts.settings, parts.strategy.server
    metrics = {name for round in (1, settings.rounds) for name in server.aggregator(round).required_metrics}
    if settings.training.epochs or TRAIN_LOSS not in metrics:
        return None
    return (
        f"strategy={settings.recording.choices['strategy']} weights clients by the losses of their training, and with "
        "local_epochs=0 there are none; set local_epochs=1 or more"
    )


def rounds_to_repeat(parts: RunParts) -> int:
    """Return the largest number of finished rounds that devices train again after a resume."""
    return parts.settings.recording.checkpoint_every - 1 if parts.context.is_deployment else 0


def needs_full_exchange(what: str) -> Rule[RoundExchange]:
    """Return the rule that all clients download and upload one global model completely, which ``what`` needs."""

    def rule(exchange: RoundExchange) -> Problem:
        if exchange.is_complete and set(exchange.models) <= {GLOBAL}:
            return None
        return (
            f"{what} needs clients that all send and receive the whole model, but the strategy or "
            "the schedule exchanges parts of it or several models; leave it out"
        )

    return rule


def sum_problem(what: str, parts: RunParts, *, weightings: Collection[str]) -> Problem:
    """Return why ``what`` cannot sum the updates of a strategy with one of the weightings, or of the method."""
    for round in (1, parts.settings.rounds):  # a strategy may have a warm-up
        problem = _why_no_sum(parts.strategy.server.aggregator(round), weightings)
        if problem:
            return (
                f"{what} needs a strategy that adds up the clients, but strategy="
                f"{parts.settings.recording.choices['strategy']} {problem}: set strategy=fedavg "
                "strategy.weighting=uniform, or strategy=l_dawa strategy.scale_at=client"
            )
    if parts.method.uploaded_parts:
        return f"{what} does not cover the parts that {type(parts.method).__name__} uploads; set another method"
    return None


def _why_no_sum(aggregator: Aggregator, weightings: Collection[str]) -> Problem:
    """Return why an aggregator is no sum with one of the weightings; None if it is."""
    if not isinstance(aggregator, WeightedSum) or aggregator.scale != "none":
        return "compares, selects or corrects them on the server"
    if aggregator.weighting in weightings:
        return None
    return {
        "examples": "weights them by their numbers of images, so that the influence of one is not bounded",
        "loss": "weights them by their losses relative to the smallest of the round, which no client knows",
    }[aggregator.weighting]
