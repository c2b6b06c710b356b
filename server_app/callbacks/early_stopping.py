"""Early stopping of a run, see `fedssl.evaluation.early_stopping`."""

import logging
from collections.abc import Mapping
from pathlib import Path

from fedssl.config.settings import EarlyStopping
from fedssl.evaluation.early_stopping import monitor_problem, stop_reason, threshold_problem
from fedssl.evaluation.protocol import evaluation_problem
from fedssl.evaluation.scores import ACCURACY
from fedssl.rules import Problem
from fedssl.runs.jsonl import read_jsonl
from server_app.callbacks.base import Callback, RoundEnd, RunEnd
from strategies.rules import RunParts
from strategies.types import ServerState

log = logging.getLogger("fedssl")


class EarlyStop(Callback):
    """Ends a run by the results of its evaluations, those before a resumption included."""

    def __init__(self, rule: EarlyStopping, folder: Path, *, rounds: int) -> None:
        self._rule, self._folder, self._rounds = rule, folder, rounds
        self._evaluations: list[tuple[int, Mapping[str, float]]] = []  # by round

    def on_run_start(self, state: ServerState) -> None:
        lines = read_jsonl(self._folder / "metrics.jsonl") if state.round else []
        self._evaluations = [(line["round"], line["evaluation"]) for line in lines if "evaluation" in line]

    def on_round_end(self, end: RoundEnd) -> None:
        if "evaluation" in end.line:
            self._evaluations.append((end.state.round, end.line["evaluation"]))

    def stop_reason(self) -> Problem:
        return stop_reason(self._evaluations, self._rule)

    def on_run_end(self, end: RunEnd) -> None:
        if end.status == "finished" and end.state.round < self._rounds:
            end.reason = self.stop_reason()
            log.info(
                "early_stopping: %s; the run stops after round %d of %d", end.reason, end.state.round, self._rounds
            )


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
