"""Whether a run can end early as its settings say, found out before any round."""

from collections.abc import Mapping

from fedssl.config.settings import Settings
from fedssl.early_stopping import check_monitor, check_threshold_unit
from fedssl.errors import InputError
from fedssl.evaluation.evaluation_input import why_not_evaluable
from fedssl.evaluation.scores import ACCURACY
from fedssl.methods.base import SSLMethod


def validate_early_stopping(
    settings: Settings, method: SSLMethod, *, result_units: Mapping[str, str] | None, phases: int
) -> None:
    """Refuse, by an `InputError`, to end a run by what no round will have, or before all stages are trained.

    ``result_units`` are names and units of what rounds are judged by, and None where only an evaluation tells them: then the
    first one does.
    """
    rule = settings.evaluation.early_stopping
    if rule.monitor is None:
        return
    if phases > 1:
        raise InputError(
            f"early_stopping.monitor={rule.monitor} would end a schedule of {phases} stages before its last; set "
            "early_stopping.monitor=null or schedule=end_to_end"
        )
    problem = why_not_evaluable(settings.data)
    if problem:
        raise InputError(f"early_stopping.monitor={rule.monitor} needs evaluations; {problem}")
    if result_units is not None:
        found = {**result_units, **({"classifier": ACCURACY} if method.uses_labels else {})}
        check_monitor(rule, found)
        check_threshold_unit(rule, found[rule.monitor])
