"""Which figures there are, by name, and drawing those that were asked for."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedssl.errors import InputError
from fedssl.plots.cka import draw_cka, draw_layers
from fedssl.plots.comparisons import draw_accuracy, draw_divergence, draw_sensitivity
from fedssl.plots.curves import draw_cosines, draw_metrics, draw_spectra
from fedssl.plots.embeddings import draw_sphere, draw_tsne
from fedssl.plots.forgetting import draw_forgetting
from fedssl.plots.landscape import draw_landscape
from fedssl.plots.partition import draw_partition
from fedssl.plots.style import PAPER_FORMATS
from fedssl.runs.loaded_run import LoadedRun, load_run_folder
from fedssl.runs.run import Run

# Of what every run writes; None where a folder has nothing for it.
RUN_PLOTS: dict[str, Callable[..., Path | None]] = {
    "partition": draw_partition,
    "metrics": draw_metrics,
    "cosines": draw_cosines,
    "spectrum": draw_spectra,
    "tsne": draw_tsne,
    "sphere": draw_sphere,
    "cka": draw_cka,
}

# Of the models that a run keeps with keep_models=N, and of its images.
MODEL_PLOTS: dict[str, Callable[..., Path]] = {
    "landscape": draw_landscape,
    "cka_layers": draw_layers,
    "forgetting": draw_forgetting,
}

# Of several runs together.
COMPARISON_PLOTS: dict[str, Callable[..., Path]] = {
    "accuracy": draw_accuracy,
    "divergence": draw_divergence,
    "sensitivity": draw_sensitivity,
}

PLOT_NAMES = (*RUN_PLOTS, *MODEL_PLOTS, *COMPARISON_PLOTS)


def plot_all(
    runs: Sequence[Run], names: Sequence[str], *, into: Path, overrides: Sequence[str], log: Callable[[str], None]
) -> None:
    """Draw figures of every run into its ``figures/``, and those of all together into ``figures/`` of a folder.

    Parameters
    ----------
    runs : sequence of Run
    names : sequence of str
        Some of `PLOT_NAMES`; none: those of what every run writes.
    into : Path
    overrides : sequence of str
        The user's own settings, see `load_run_folder`.
    log : callable
        Is told a line about every folder.

    Raises
    ------
    InputError
        There is no figure of that name, or a run lacks what it needs.
    """
    unknown = [name for name in names if name not in PLOT_NAMES]
    if unknown:
        raise InputError(
            f"--figures {unknown[0]} is no figure; choose of {', '.join(PLOT_NAMES)} (folders come before --figures)"
        )
    models = [name for name in names if name in MODEL_PLOTS]
    opened = {run.folder: load_run_folder(run.folder, overrides) for run in runs} if models else {}
    for run in runs:
        drawn = [RUN_PLOTS[name](run.folder, formats=PAPER_FORMATS) for name in RUN_PLOTS if name in names or not names]
        drawn += _of_models(opened.get(run.folder), models)
        files = [file.name for file in drawn if file is not None]
        if files or not names or set(names) & {*RUN_PLOTS, *MODEL_PLOTS}:
            told = f"{run.folder / 'figures'}: {', '.join(files)}" if files else f"{run.folder}: nothing to draw"
            log(told)
    drawn = [COMPARISON_PLOTS[name](runs, into, formats=PAPER_FORMATS) for name in COMPARISON_PLOTS if name in names]
    if drawn:
        log(f"{into / 'figures'}: {', '.join(file.name for file in drawn if file is not None)}")


def _of_models(run: LoadedRun | None, names: Sequence[str]) -> list[Path | None]:
    return [] if run is None else [MODEL_PLOTS[name](run, formats=PAPER_FORMATS) for name in names]
