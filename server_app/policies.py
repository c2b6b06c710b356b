"""When a round ends: rules about over-selection and buffering."""

from fedssl.config.settings import Settings
from fedssl.rules import Problem
from strategies.rules import RunParts, needs_full_exchange


def updates_suffice(settings: Settings) -> Problem:
    """Require no more updates than clients train in a round."""
    min_updates, per_round = settings.aggregation.min_updates, settings.clients_per_round
    if min_updates <= per_round:
        return None
    return (
        f"aggregation.min_updates={min_updates} but clients_per_round={per_round}; lower the first or raise the second"
    )


def buffering_selects_no_more(settings: Settings) -> Problem:
    """Refuse over-selection with buffering, which needs none."""
    if not (settings.aggregation.buffered and settings.aggregation.over_selection):
        return None
    return "aggregation.buffered=true waits for aggregation.min_updates; set aggregation.over_selection=0"


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


SETTINGS_RULES = (updates_suffice, buffering_selects_no_more)
RUN_RULES = (clients_suffice,)
ROUND_RULES = (needs_full_exchange("aggregation.buffered=true"),)  # with buffering
