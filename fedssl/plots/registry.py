"""Plots by name, and writing those that were asked for: at the end of a run, by ``fedssl-report``, and for its page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from fedssl.errors import InputError
from fedssl.plots.cka import plot_cka, plot_layer_cka
from fedssl.plots.comparisons import plot_accuracy, plot_divergence, plot_sensitivity
from fedssl.plots.curves import plot_cosines, plot_metrics, plot_spectra
from fedssl.plots.embeddings import plot_sphere, plot_tsne
from fedssl.plots.forgetting import plot_forgetting
from fedssl.plots.landscape import plot_landscape
from fedssl.plots.partition import plot_partition
from fedssl.plots.style import PAPER_FORMATS, SCREEN_FORMATS, PlotData, save_figure
from fedssl.runs.loaded_run import LoadedRun, load_run_folder
from fedssl.runs.run import Run


class Plot(NamedTuple):
    """A kind of plot.

    Attributes
    ----------
    plot : callable
        Takes the source; returns a figure with its numbers, or None if the source has nothing for it. Writes nothing.
    source : {"run", "models", "runs"}
        A run folder (`Path`); the models that a run keeps with ``snapshot_every=N`` (`LoadedRun`); several runs
        together (a list of `Run`).
    missing : str
        The error where there is nothing to plot; empty: that is none.
    """

    plot: Callable[..., PlotData | None]
    source: Literal["run", "models", "runs"]
    missing: str = ""


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
        missing="no run was evaluated in its rounds; run again with evaluation=knn evaluate_every=1",
    ),
    "divergence": Plot(plot_divergence, "runs"),
    "sensitivity": Plot(plot_sensitivity, "runs"),
}
AT_THE_END = ("metrics", "cosines", "spectrum")  # that a run writes by itself


def write_plot(
    name: str, source: Path | LoadedRun | Sequence[Run], folder: Path, *, formats: Sequence[str] = SCREEN_FORMATS
) -> Path | None:
    """Write a plot to ``figures/<name>.png`` of a folder, and in the other formats beside it.

    Returns
    -------
    Path or None
        The PNG file; None if the source has nothing to plot.

    Raises
    ------
    InputError
        The source lacks what the plot needs, its files are damaged, or the figure cannot be written.
    """
    kind = PLOTS[name]
    data = kind.plot(source)
    if data is None and kind.missing:
        raise InputError(kind.missing)
    return None if data is None else save_figure(data, folder, name, formats=formats)


def write_final_plots(folder: Path) -> list[Path]:
    """Write what a run plots at its end, as far as its folder has numbers for it; returns the files."""
    files = [write_plot(name, folder, folder) for name in AT_THE_END]
    return [file for file in files if file is not None]


def write_plots(
    runs: Sequence[Run], names: Sequence[str], *, into: Path, overrides: Sequence[str], log: Callable[[str], None]
) -> None:
    """Write plots of every run into its ``figures/``, and those of all together into ``figures/`` of a folder.

    Parameters
    ----------
    runs : sequence of Run
    names : sequence of str
        Some of `PLOTS`; none: those of what every run writes.
    into : Path
    overrides : sequence of str
        The user's own settings, see `load_run_folder`.
    log : callable
        Takes a line about every folder.

    Raises
    ------
    InputError
        There is no plot of that name, or a run lacks what it needs.
    """
    unknown = [name for name in names if name not in PLOTS]
    if unknown:
        raise InputError(
            f"--figures {unknown[0]} is no figure; choose of {', '.join(PLOTS)} (folders come before --figures)"
        )
    wanted = [name for name in PLOTS if name in names or (not names and PLOTS[name].source == "run")]
    of_models = any(PLOTS[name].source == "models" for name in wanted)
    loaded = {run.folder: load_run_folder(run.folder, overrides) for run in runs} if of_models else {}
    for run in runs:
        sources = {"run": run.folder, "models": loaded.get(run.folder)}
        kinds = [(name, sources[PLOTS[name].source]) for name in wanted if PLOTS[name].source in sources]
        if kinds:
            log(_write(kinds, run.folder) or f"{run.folder}: nothing to draw")
    together = [(name, runs) for name in wanted if PLOTS[name].source == "runs"]
    if together:
        log(_write(together, into))


def _write(sources: Sequence[tuple[str, Path | LoadedRun | Sequence[Run] | None]], folder: Path) -> str:
    """Write these plots; returns a line that names the files, empty if there is none."""
    written = [
        write_plot(name, source, folder, formats=PAPER_FORMATS) for name, source in sources if source is not None
    ]
    files = [file.name for file in written if file is not None]
    return f"{folder / 'figures'}: {', '.join(files)}" if files else ""
