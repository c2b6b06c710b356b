"""All rules about a run, which are checked before its folder exists. Each stands beside the feature that needs it."""

from collections.abc import Sequence

from fedssl.config.settings import Settings
from fedssl.rules import Rule
from server_app import (
    client_states,
    devices,
    evaluator,
    federation,
    policies,
    teacher,
    training_rules,
)
from server_app.callbacks import early_stopping
from server_app.exchanges import secure, virtual_time
from strategies.mods import MODS
from strategies.mods.base import Mod
from strategies.rules import RoundExchange, RunParts, strategy_supports_run

SETTINGS_RULES: Sequence[Rule[Settings]] = (
    *teacher.SETTINGS_RULES,
    *training_rules.SETTINGS_RULES,
    *policies.SETTINGS_RULES,
    *secure.SETTINGS_RULES,
    *(rule for mod in MODS for rule in mod.settings_rules),
    *federation.SETTINGS_RULES,
)

COST_RULES: Sequence[Rule[Settings]] = secure.COST_RULES  # about what an estimate of the cost covers

RUN_RULES: Sequence[Rule[RunParts]] = (
    *teacher.RUN_RULES,
    strategy_supports_run,
    *training_rules.RUN_RULES,
    *policies.RUN_RULES,
    *(rule for mod in MODS for rule in mod.run_rules),
    *secure.RUN_RULES,
    *devices.RUN_RULES,
    *client_states.RUN_RULES,
    *evaluator.RUN_RULES,
    *early_stopping.RUN_RULES,
    *virtual_time.RUN_RULES,
)


def round_rules(settings: Settings, mods: Sequence[Mod]) -> Sequence[Rule[RoundExchange]]:
    """Return the rules about what the clients of a round exchange, of the features that the run uses."""
    return (
        *(policies.ROUND_RULES if settings.aggregation.buffered else ()),
        *(rule for mod in mods for rule in mod.round_rules),
        *secure.round_rules(settings),
    )
