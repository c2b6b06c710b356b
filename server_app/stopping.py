"""Whether a run can end early as its settings say, found out before any round."""

from collections.abc import Mapping

from fedssl.config.settings import Settings
from fedssl.early_stopping import check_metric, check_size
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
    rule = settings.evaluation.stop
    if rule.metric is None:
        return
    if phases > 1:
        raise InputError(
            f"stop_when.metric={rule.metric} would end a schedule of {phases} stages before its last; set "
            "stop_when.metric=null or schedule=end_to_end"
        )
    problem = why_not_evaluable(settings.data)
    if problem:
        raise InputError(f"stop_when.metric={rule.metric} needs evaluations; {problem}")
    if result_units is not None:
        found = {**result_units, **({"classifier": ACCURACY} if method.uses_labels else {})}
        check_metric(rule, found)
        check_size(rule, found[rule.metric])
