"""When a round ends, how many clients it has, what happens to replies that arrive later, and the rules about these.

Buffered aggregation applies late updates to the current model with smaller weights (Nguyen et al., "Federated Learning
with Buffered Asynchronous Aggregation" (FedBuff), AISTATS 2022).
"""

import math
from dataclasses import dataclass, replace

from fedssl.arrays import Layers, is_weight
from fedssl.config.aggregation_settings import AggregationSettings
from fedssl.config.settings import Settings
from fedssl.rules import Problem
from strategies.rules import RunParts, needs_full_exchange
from strategies.types import GLOBAL


@dataclass(frozen=True, kw_only=True)
class LoopPolicy:
    """Policy of the rounds of a run, and of the attempts at each."""

    extra: int = 0  # clients sampled beyond ``clients_per_round``, whose first replies are used
    deadline: float | None = None  # seconds after which a round ends without the missing clients
    min_replies: int | None = None  # with which a round ends; None waits for all
    min_updates: int = 1  # that a round needs
    max_retries: int = 0
    uses_late: bool = False  # whether late replies are applied to the current model

    def for_round(self, clients_per_round: int) -> "LoopPolicy":
        """Return the policy of a round, which may have more clients than earlier ones."""
        return replace(self, min_replies=clients_per_round) if self.extra else self

    def needed_updates(self, *, rejected: int) -> int:
        """Return the smallest number of updates of a round in which ``rejected`` replies are not usable.

        With buffering these count as well, but one: the round has ended after ``min_replies``, and waits for no others.
        """
        return max(self.min_updates - rejected, 1) if self.uses_late else self.min_updates

    @property
    def may_end_early(self) -> bool:
        """Return whether a round may end without some of its clients."""
        return bool(self.extra) or self.deadline is not None or self.min_replies is not None

    @property
    def models(self) -> tuple[str, ...]:
        """Return the models that may receive updates although no client of the round starts from them."""
        return (GLOBAL,) if self.uses_late else ()


def updates_suffice(settings: Settings) -> Problem:
    """Require no more updates than clients train in a round, and no over-selection with buffering."""
    aggregation, per_round = settings.aggregation, settings.clients_per_round
    if aggregation.min_updates > per_round:
        return (
            f"aggregation.min_updates={aggregation.min_updates} but clients_per_round={per_round}; lower the first or "
            "raise the second"
        )
    if aggregation.buffered and aggregation.over_selection:
        return "aggregation.buffered=true waits for aggregation.min_updates; set aggregation.over_selection=0"
    return None


def clients_suffice(parts: RunParts) -> Problem:
    """Require enough simulated clients for over-selection. Devices come and go."""
    settings = parts.settings
    over_selection, per_round = settings.aggregation.over_selection, settings.clients_per_round
    if parts.context.is_deployment or per_round + over_selection <= settings.num_clients:
        return None
    return (
        f"aggregation.over_selection={over_selection} but clients_per_round={per_round} leaves "
        f"{settings.num_clients - per_round} of num_clients={settings.num_clients}; lower one of them"
    )


SETTINGS_RULES = (updates_suffice,)
RUN_RULES = (clients_suffice,)
ROUND_RULES = (needs_full_exchange("aggregation.buffered=true"),)  # with buffering


def make_policy(settings: AggregationSettings) -> LoopPolicy:
    """Return the policy of the settings."""
    return LoopPolicy(
        extra=settings.over_selection,
        deadline=settings.round_deadline,
        min_replies=settings.min_updates if settings.buffered else None,
        min_updates=settings.min_updates,
        max_retries=settings.max_retries,
        uses_late=settings.buffered,
    )


def apply_stale_update(layers: Layers, *, start: Layers, current: Layers, staleness: int) -> Layers:
    """Apply an update of ``staleness`` rounds ago to the current model.

    ``current + (layers - start) / sqrt(1 + staleness)`` (Section 5.1, s(tau) = (1 + tau)^-0.5). The mean over clients
    is then FedBuff's server update (Algorithm 1) with a server learning rate of 1. Running statistics, which FedBuff
    does not cover, move towards the client's: ``current + (layers - current) / sqrt(1 + staleness)``, because a
    difference can make a variance negative. Integer counters are returned unchanged.
    """
    weight = 1 / math.sqrt(1 + staleness)
    updated: Layers = {}
    for name, array in layers.items():
        origin = start[name] if is_weight(name, array) else current[name]
        updated[name] = array
        if array.dtype.kind == "f":
            updated[name] = current[name] + (array - origin) * array.dtype.type(weight)
    return updated
