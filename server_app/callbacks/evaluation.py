"""The evaluation of the models after a round, and the results of a finished run: evaluation, encoders and figures."""

from pathlib import Path

from fedssl.errors import InputError
from fedssl.evaluation.scores import mean_over_models, to_flat_dict, units_of
from fedssl.logs import log
from fedssl.methods.base import SSLMethod, build_method
from fedssl.plots.partition import save_partition_plot
from fedssl.plots.registry import write_final_plots
from fedssl.schedule.stages import set_active_stages
from server_app.build import ClientData, RunComponents
from server_app.callbacks.base import Callback, RoundEnd, RunEnd
from server_app.evaluator import Evaluator, ResultsByModel
from server_app.models import arrays_by_model, export_encoders, load_each

MAX_NOTED = 9  # first values of a feature shift in the figure; images may have many channels


class Evaluation(Callback):
    """Evaluates the models of a round by loading them into ``method``, which nothing else uses at that time."""

    def __init__(self, evaluator: Evaluator, method: SSLMethod) -> None:
        self._evaluator, self._method = evaluator, method

    def on_round_end(self, end: RoundEnd) -> None:
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


class Results(Callback):
    """Evaluates and exports the models, and draws the figures, when all rounds have been run."""

    def __init__(self, components: RunComponents, folder: Path) -> None:
        self._components, self._folder = components, folder

    def on_run_end(self, end: RunEnd) -> None:
        if end.status != "finished":
            return
        components, settings, method = self._components, self._components.settings, self._components.method
        with set_active_stages(method, depth=components.context.phases[-1].depth):
            models = arrays_by_model(components.context, end.state)
            untrained = build_method(settings.model).to(components.context.device)
            baselines = components.evaluator.baselines(untrained)
            results = components.evaluator.evaluate(load_each(method, models), final=True)
            export_encoders(self._folder, method, models, settings, rounds=end.state.round)
        end.final = {}
        if baselines:  # else there are no labeled images
            federated = mean_over_models(list(results.values()))
            end.final = {"untrained": baselines["untrained"], "federated": federated, "pixels": baselines["pixels"]}
            end.models = results
        draw_partition(self._folder, components.client_data)
        try:
            write_final_plots(self._folder)
        except InputError as error:  # the run is complete without figures
            log.warning("no figures, or not all: %s", error)


def draw_partition(folder: Path, client_data: ClientData | None) -> None:
    """Draw the partition, if it is known."""
    if client_data is None:
        return
    image_data, partition = client_data.image_data, client_data.partition
    file = folder / "figures" / "partition.png"
    names, *rows = [line[1:MAX_NOTED] for line in client_data.shifts] or [[]]
    notes = [", ".join(f"{name} {value}" for name, value in zip(names, row, strict=True)) for row in rows]
    groups, of_groups, kind = partition.groups, partition.names, partition.kind
    if groups is None:
        groups, of_groups, kind = image_data.labels, image_data.classes, "class"
    save_partition_plot(file, client_data.parts, groups, of_groups, kind=kind, notes=notes)
