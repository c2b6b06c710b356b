"""All rules about a run, which are checked before its folder exists. Each stands beside the feature that needs it."""

from collections.abc import Sequence

from fedssl.config.settings import Settings
from fedssl.rules import Rule
from server_app import (
    client_states,
    devices,
    differential_privacy,
    evaluator,
    policies,
    secure_aggregation,
    training_rules,
)
from server_app.callbacks import early_stopping
from strategies import low_rank_aggregation
from strategies.rules import RoundExchange, RunParts

SETTINGS_RULES: Sequence[Rule[Settings]] = (
    *training_rules.SETTINGS_RULES,
    *policies.SETTINGS_RULES,
    *secure_aggregation.SETTINGS_RULES,
    *differential_privacy.SETTINGS_RULES,
    *low_rank_aggregation.SETTINGS_RULES,
)

RUN_RULES: Sequence[Rule[RunParts]] = (
    *training_rules.RUN_RULES,
    *policies.RUN_RULES,
    *low_rank_aggregation.RUN_RULES,
    *differential_privacy.RUN_RULES,
    *secure_aggregation.RUN_RULES,
    *devices.RUN_RULES,
    *client_states.RUN_RULES,
    *evaluator.RUN_RULES,
    *early_stopping.RUN_RULES,
)


def round_rules(settings: Settings) -> Sequence[Rule[RoundExchange]]:
    """Return the rules about what the clients of a round exchange, of the features that the run uses."""
    return (
        *(policies.ROUND_RULES if settings.aggregation.buffered else ()),
        *(differential_privacy.ROUND_RULES if settings.privacy else ()),
        *(secure_aggregation.ROUND_RULES if settings.secure_aggregation else ()),
    )
