"""The results of a finished run: final evaluation, encoders and figures."""

from pathlib import Path

from fedssl.evaluation.scores import mean_over_models
from fedssl.methods.base import build_method
from fedssl.plots.partition import save_partition_plot
from fedssl.plots.registry import write_final_plots
from fedssl.schedule.stages import set_active_stages
from server_app.build import ClientData, RunComponents
from server_app.callbacks.base import Callback, RunEnd
from server_app.models import arrays_by_model, export_encoders, load_each


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
        draw_partition(self._folder, components.client_data)
        write_final_plots(self._folder)
        end.final = {}
        if baselines:  # else there are no labeled images
            federated = mean_over_models(list(results.values()))
            end.final = {"untrained": baselines["untrained"], "federated": federated, "pixels": baselines["pixels"]}
            end.models = results


def draw_partition(folder: Path, client_data: ClientData | None) -> None:
    """Draw the partition, if it is known."""
    if client_data is None:
        return
    image_data, partition = client_data.image_data, client_data.partition
    file = folder / "figures" / "partition.png"
    if partition.groups is None:
        save_partition_plot(file, client_data.parts, image_data.labels, image_data.classes)
    else:
        save_partition_plot(file, client_data.parts, partition.groups, partition.names, kind=partition.kind)
