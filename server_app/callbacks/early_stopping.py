"""Early stopping: a rule over the results of evaluations that ends a run before its last round.

The rule is a pure function of the recorded results, so that a resumed run ends in the same round as an uninterrupted
one.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from fedssl.config.settings import EarlyStopping
from fedssl.errors import InputError
from fedssl.evaluation.protocol import evaluation_problem
from fedssl.evaluation.scores import ACCURACY, ERROR, IN_PERCENT
from fedssl.logs import log
from fedssl.rules import Problem
from fedssl.runs.jsonl import read_jsonl
from server_app.callbacks.base import Callback, RoundEnd, RunEnd
from server_app.evaluator import CLASSIFIER
from strategies.rules import RunParts
from strategies.types import ServerState


def stop_reason(evaluations: Iterable[tuple[int, Mapping[str, float]]], rule: EarlyStopping) -> str | None:
    """Return the reason to end a run, given the results of its evaluated rounds in order; None: the run continues."""
    if rule.monitor is None:
        return None
    best, best_round, since = float("-inf"), 0, 0
    for round, results in evaluations:
        if problem := monitor_problem(rule, results):
            raise InputError(problem)
        value = results[rule.monitor]
        if rule.threshold is not None and value >= rule.threshold:
            return f"{rule.monitor} reached {rule.threshold:g} in round {round}"
        if value > best + rule.min_delta:
            best, best_round, since = value, round, 0
        else:
            since += 1
        if since == rule.patience:
            by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
            return (
                f"{rule.monitor} did not improve{by} in {since} evaluation{'s' * (since > 1)} after round {best_round}"
            )
    return None


def monitor_problem(rule: EarlyStopping, names: Collection[str]) -> Problem:
    """Return the sentence of a rule whose result is not part of the evaluation."""
    if rule.monitor is None or rule.monitor in names:
        return None
    available = f"has {', '.join(names)}; choose one of these, or" if names else "has none; choose"
    return f"early_stopping.monitor={rule.monitor} is not a result of evaluation, which {available} another evaluation"


def threshold_problem(rule: EarlyStopping, unit: str) -> Problem:
    """Return the sentence of a unit of which less is better, or of thresholds that such a result cannot reach."""
    if unit == ERROR:
        return f"early_stopping.monitor={rule.monitor} is an error; choose a result of which more is better"
    for name, value in (("threshold", rule.threshold), ("min_delta", rule.min_delta)):
        if unit in IN_PERCENT and value is not None and value > 1:
            return (
                f"early_stopping.{name}={value:g} but {rule.monitor} is in [0, 1]; for {value:g}% set "
                f"early_stopping.{name}={value / 100:g}"
            )
    return None


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
            "schedule=end_to_end, or early_stopping.monitor=null early_stopping.patience=null "
            "early_stopping.threshold=null"
        )
    problem = None if parts.result_units() else evaluation_problem(settings.data)
    if problem:
        return f"early_stopping.monitor={rule.monitor} needs evaluations; {problem}"
    units = {**parts.result_units(), **({CLASSIFIER: ACCURACY} if parts.method.uses_labels else {})}
    return monitor_problem(rule, units) or threshold_problem(rule, units[rule.monitor])


RUN_RULES = (monitor_is_a_result,)
