"""The evaluation of the models after a round."""

from fedssl.evaluation.scores import mean_over_models, to_flat_dict, units_of
from fedssl.methods.base import SSLMethod
from fedssl.schedule.stages import set_active_stages
from server_app.callbacks.base import Callback, ResultsByModel, RoundEnd
from server_app.evaluator import Evaluator
from server_app.models import load_each


class Evaluation(Callback):
    """Evaluates the models of a round by loading them into ``method``, which nothing else uses at that time."""

    def __init__(self, evaluator: Evaluator, method: SSLMethod) -> None:
        self._evaluator, self._method = evaluator, method

    def on_round_end(self, end: RoundEnd) -> None:
        """Add the results of the models, and their means, to the line."""
        if not self._evaluator.due(end.state.round):
            return
        with set_active_stages(self._method, depth=end.phase.depth):
            results = self._evaluator.evaluate(load_each(self._method, end.models))
        end.evaluation = mean_over_models(list(results.values())) if results else {}
        if end.evaluation:
            end.line |= {"evaluation": to_flat_dict(end.evaluation), "units": units_of(end.evaluation)}
            end.line |= results_by_model(results)


def results_by_model(results: ResultsByModel) -> dict[str, dict[str, dict[str, float]]]:
    """Return the results of several models by name, under ``models``. Those of a single model are known already."""
    return {"models": {name: to_flat_dict(scores) for name, scores in results.items()}} if len(results) > 1 else {}
