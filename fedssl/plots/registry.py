"""Plots by name, and functions that write them at the end of a run and for ``fedssl-report``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from fedssl.errors import InputError, error_of_path
from fedssl.plots.cka import plot_cka, plot_layer_cka
from fedssl.plots.comparisons import plot_accuracy, plot_divergence, plot_tradeoff
from fedssl.plots.curves import plot_cosines, plot_metrics, plot_spectra
from fedssl.plots.embeddings import plot_sphere, plot_tsne
from fedssl.plots.forgetting import plot_forgetting
from fedssl.plots.landscape import plot_landscape
from fedssl.plots.partition import plot_partition
from fedssl.plots.ranks import plot_critical_difference
from fedssl.plots.style import PAPER_FORMATS, SCREEN_FORMATS, PlotData, sanitize_texts, save_figure
from fedssl.plots.swept import plot_heatmap, plot_sensitivity
from fedssl.runs.loaded_run import LoadedRun, load_run_folder
from fedssl.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Plot(NamedTuple):
    """A kind of plot. Its function maps the source to a figure with its numbers, or to None without data."""

    plot: Callable[..., PlotData | None]
    source: Literal["run", "models", "runs"]  # a folder, a `LoadedRun` with snapshots, or a list of `Run`
    missing: str = ""  # error message if there is no data; empty if that is no error


PLOTS = {
    "partition": Plot(plot_partition, "run"),
    "metrics": Plot(plot_metrics, "run"),
    "cosines": Plot(plot_cosines, "run"),
    "spectrum": Plot(plot_spectra, "run"),
    "tsne": Plot(plot_tsne, "run"),
    "sphere": Plot(plot_sphere, "run"),
    "cka": Plot(plot_cka, "run"),
    "landscape": Plot(plot_landscape, "models"),
    "cka_layers": Plot(plot_layer_cka, "models"),
    "forgetting": Plot(plot_forgetting, "models"),
    "accuracy": Plot(
        plot_accuracy,
        "runs",
        missing="no run was evaluated; run again with final_evaluation=knn, or evaluation=knn evaluate_every=1",
    ),
    "divergence": Plot(plot_divergence, "runs"),
    "tradeoff": Plot(
        plot_tradeoff,
        "runs",
        missing="no run was evaluated on its own data set and another one in its rounds; run again with "
        "evaluation=domains evaluate_every=1",
    ),
    "sensitivity": Plot(plot_sensitivity, "runs"),
    "heatmap": Plot(plot_heatmap, "runs"),
    "critical_difference": Plot(plot_critical_difference, "runs"),
}
FINAL_PLOTS = ("metrics", "cosines", "spectrum")  # written at the end of a run

Source = Path | LoadedRun | Sequence[Run]


def write_plot(name: str, source: Source, folder: Path, *, formats: Sequence[str] = SCREEN_FORMATS) -> Path | None:
    """Write a plot to ``figures/<name>.png`` and the other formats; return the PNG file, or None without data."""
    kind = PLOTS[name]
    data = kind.plot(source)
    if data is None and kind.missing:
        raise InputError(kind.missing)
    return None if data is None else save_figure(data, folder, name, formats=formats)


def draw_plots(run: Run, names: Sequence[str] = (), *, overrides: Sequence[str] = ()) -> dict[str, "Figure"]:
    """Return plots of a run by name, by default the partition and those of its end; none without data.

    A plot that is named needs data. For ``overrides`` see `load_run_folder`.
    """
    figures = {}
    for name in names or ("partition", *FINAL_PLOTS):
        if name not in PLOTS:
            raise InputError(f"there is no figure {name!r}; choose from {', '.join(PLOTS)}")
        kind = PLOTS[name]
        sources: dict[str, Callable[[], Source]] = {
            "run": lambda: run.folder,
            "models": lambda: load_run_folder(run.folder, overrides),
            "runs": lambda: [run],
        }
        data = kind.plot(sources[kind.source]())
        if data is None and names:
            raise InputError(kind.missing or f"{run.folder} has no data for the figure {name}; leave it out")
        if data is not None:
            sanitize_texts(data.figure)
            figures[name] = data.figure
    return figures


def write_final_plots(folder: Path) -> list[Path]:
    """Write the plots of the end of a run for which its folder has data, and return the files."""
    files = [write_plot(name, folder, folder) for name in FINAL_PLOTS]
    return [file for file in files if file is not None]


def write_plots(
    runs: Sequence[Run], names: Sequence[str], *, into: Path, overrides: Sequence[str], log: Callable[[str], None]
) -> list[str]:
    """Write plots of every run to its ``figures/``, and those of several runs to ``figures/`` of ``into``.

    ``names`` are keys of `PLOTS`; empty for all plots of run folders. For ``overrides`` see `load_run_folder`. ``log``
    takes a line about every folder. Return why a plot could not be written, one line each; all others are written.
    """
    wanted: dict[str, list[str]] = {"run": [], "models": [], "runs": []}  # by source
    for name, plot in PLOTS.items():
        if name in names or (not names and plot.source == "run"):
            wanted[plot.source].append(name)
    failures: list[str] = []
    for run in runs if wanted["run"] or wanted["models"] else ():
        files = _write(wanted["run"], run.folder, run.folder, failures)
        if wanted["models"]:
            try:
                files += _write(wanted["models"], load_run_folder(run.folder, overrides), run.folder, failures)
            except InputError as error:
                failures.append(f"{run.folder} lacks {', '.join(wanted['models'])}: {error}")
        log(f"{run.folder / 'figures'}: {', '.join(files)}" if files else f"{run.folder}: no data for figures")
    files = _write(wanted["runs"], runs, into, failures)
    if files:
        log(f"{into / 'figures'}: {', '.join(files)}")
    return failures


def _write(names: Sequence[str], source: Source, folder: Path, failures: list[str]) -> list[str]:
    """Write plots and return the names of the files. Append a line to ``failures`` for each that cannot be written."""
    files: list[str] = []
    for name in names:
        try:
            file = write_plot(name, source, folder, formats=PAPER_FORMATS)
        except (InputError, OSError) as error:
            reason = error_of_path(error) if isinstance(error, OSError) else error
            failures.append(f"{folder} lacks {name}: {reason or error}")
        else:
            files += [] if file is None else [file.name]
    return files
