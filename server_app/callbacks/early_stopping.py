"""Early stopping of a run, see `fedssl.evaluation.early_stopping`."""

from fedssl.evaluation.early_stopping import monitor_problem, threshold_problem
from fedssl.evaluation.protocol import evaluation_problem
from fedssl.evaluation.scores import ACCURACY
from fedssl.rules import Problem
from strategies.rules import RunParts


def monitor_is_a_result(parts: RunParts) -> Problem:
    """Refuse to stop by a result that no round has, or before all stages are trained."""
    settings, rule, phases = parts.settings, parts.settings.evaluation.early_stopping, len(parts.context.phases)
    if rule.monitor is None or parts.result_units is None:
        return None
    if phases > 1:
        return (
            f"early_stopping.monitor={rule.monitor} would stop a schedule of {phases} stages before its last; set "
            "early_stopping.monitor=null or schedule=end_to_end"
        )
    problem = evaluation_problem(settings.data)
    if problem:
        return f"early_stopping.monitor={rule.monitor} needs evaluations; {problem}"
    units = {**parts.result_units(), **({"classifier": ACCURACY} if parts.method.uses_labels else {})}
    return monitor_problem(rule, units) or threshold_problem(rule, units[rule.monitor])


RUN_RULES = (monitor_is_a_result,)
