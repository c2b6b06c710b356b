"""Runs in a program or a notebook: `fedssl.run`, `fedssl.load` and `fedssl.compose`.

They accept what the command ``fedssl`` accepts. Every invalid input raises `fedssl.InputError` with the sentence of the
command; a run that fails raises `fedssl.RunError`. A run leaves nothing behind in the process, see
`fedssl.machine.process_state`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from fedssl.command_line import RUN_MODULE, SERVER_MODULE, check_packages, shown_error
from fedssl.config.literal import user_path
from fedssl.config.load import load_settings
from fedssl.config.overrides import quote_value
from fedssl.config.python_values import Value, to_overrides
from fedssl.config.settings import Settings
from fedssl.config.targets import expand_config_dir_flag, search_folders
from fedssl.errors import InputError, RunError, RunStopped
from fedssl.machine.process_state import restored_process, restored_torch
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import RUN_MARKERS, read_run, run_folders

if TYPE_CHECKING:  # slow imports
    import pandas
    import torch
    from flwr.app import ArrayRecord
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy
    from matplotlib.figure import Figure

    from fedssl.embedding import Embeddings

PathLike = str | os.PathLike[str]


def run(
    *overrides: str,
    path: PathLike | None = None,
    config_dir: PathLike | Sequence[PathLike] = (),
    **settings: Value,
) -> "Run":
    """Run a federation with all its clients on this machine, and return its results.

    >>> run = fedssl.run(strategy="fedavg", dataset="folder", path="photos", rounds=20)
    >>> run = fedssl.run("partition.alpha=0.1", strategy="fedu", optimizer__lr=0.03)

    Two runs of one process, e.g. in threads, follow each other. An interrupted run is continued with
    ``fedssl.run(resume=FOLDER)``.

    Parameters
    ----------
    *overrides : str
        Overrides as on the command line, such as ``"partition.alpha=0.1"``.
    path : path, optional
        Setting ``dataset.path``.
    config_dir : path or sequence of paths
        Folders with settings of your own components, as ``--config-dir``.
    **settings
        Settings by name, with two underscores in place of a dot: ``partition__alpha=0.1``. They come after
        ``overrides``. A mapping sets several: ``partition={"alpha": 0.1}``.

    Raises
    ------
    InputError
        For every invalid setting, file or folder.
    RunError
        If the run fails.
    """
    with _as_sentence():
        words = _words(overrides, path, config_dir, settings)
        with restored_process():
            check_packages()  # a script may be called simulation.py
            simulation = import_module(RUN_MODULE)
            of_run = simulation.settings_of(words)  # before torch is imported, which is slow
            try:
                with restored_torch():
                    folder: Path | None = simulation.run_again(of_run, words)
            except RunStopped as stop:
                again = ", ".join(map(repr, stop.overrides))
                raise KeyboardInterrupt(f"after round {stop.rounds}; continue with fedssl.run({again})") from None
        if folder is None:
            raise RunError(
                "the run folder is on another machine, see above; copy it from there, and open it with fedssl.load"
            )
        return Run(folder, config_dirs=search_folders(words))


def load(folder: PathLike, *, config_dir: PathLike | Sequence[PathLike] = ()) -> "Run":
    """Return the run in a folder, in any status. ``config_dir`` is as in `run`."""
    with _as_sentence():
        found = user_path(os.fspath(folder)).absolute()
        if not any((found / name).is_file() for name in RUN_MARKERS):
            runs = run_folders(found)
            advice = f"; it has {len(runs)} runs, such as {runs[0]}" if runs else "; give the folder of a run"
            raise InputError(f"{found} {'is not a run folder' if found.is_dir() else 'does not exist'}{advice}")
        return Run(found, config_dirs=search_folders(_words((), None, config_dir, {})))


def compose(
    *overrides: str,
    path: PathLike | None = None,
    config_dir: PathLike | Sequence[PathLike] = (),
    **settings: Value,
) -> "Composed":
    """Return the validated settings for arguments of `run`, with what a ServerApp of your own needs.

    Examples
    --------
    >>> @app.main()
    ... def main(grid, context):
    ...     server = fedssl.compose(strategy="fedu", method="byol").server(grid)
    ...     server.strategy.start(grid=grid, initial_arrays=server.initial_arrays, num_rounds=server.num_rounds)
    """
    with _as_sentence():
        words = _words(overrides, path, config_dir, settings)
        return Composed(load_settings(words), tuple(words))


class ServerParts(NamedTuple):
    """Arguments of Flower's loop. The strategy is bit-identical with `run`, without recording and checkpoints."""

    strategy: "Strategy"
    initial_arrays: "ArrayRecord"
    num_rounds: int


@dataclass(frozen=True)
class Composed:
    """Validated settings, and the overrides that they are composed of."""

    settings: Settings
    overrides: tuple[str, ...]

    def server(self, grid: "Grid") -> ServerParts:
        """Return the parts of a ServerApp whose nodes run ``client_app.app:app``.

        Without ``num_clients`` there are as many clients as the federation has nodes.
        """
        with _as_sentence():
            from fedssl.datasets.base import find_changes

            find_changes()
            parts: ServerParts = import_module(SERVER_MODULE).server_parts(grid, self.overrides)
            return parts


class Figures(dict[str, "Figure"]):
    """Figures of matplotlib by name, which a notebook displays."""

    def _repr_html_(self) -> str:
        from fedssl.pages import base64_of

        images = []
        for name, figure in self.items():
            data = base64_of(partial(figure.savefig, format="png", dpi=100))
            images.append(f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">')
        return "<br>".join(images)


class Run:
    """A run and its results. Files are read when they are asked for, also while the run continues."""

    def __init__(self, folder: Path, *, config_dirs: Sequence[Path] = ()) -> None:
        self.path = folder
        self._config_dirs = config_dirs

    def __repr__(self) -> str:
        found = read_run(self.path)
        results = [f"{name} {score.text}" for name, score in found.latest_results.items()]
        return f"<fedssl.Run {self.path}: {', '.join([found.state, found.progress, *results])}>"

    @property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``: status, final results, versions and more. Empty while the run continues."""
        with _as_sentence():
            return read_run(self.path).summary or {}

    @property
    def results(self) -> "pandas.DataFrame":
        """Final results: a column for the federated and the untrained encoder and raw pixels, a row for each name."""
        import pandas

        return pandas.DataFrame(self.summary.get("final", {}))

    @property
    def metrics(self) -> "pandas.DataFrame":
        """A row for each round: loss, cosines, bytes, seconds, and results such as ``evaluation.knn``."""
        return self._table("metrics.jsonl").set_index("round")

    @property
    def clients(self) -> "pandas.DataFrame":
        """A row for each client and round."""
        return self._table("clients.jsonl")

    def _table(self, name: str) -> "pandas.DataFrame":
        import pandas

        with _as_sentence():
            lines = read_jsonl(self.path / name)
        rows = []
        for line in lines:
            row = {key: float("nan") if value is None else value for key, value in line.items() if key != "units"}
            dropped = {"dropped": len(line["dropped"])} if "dropped" in line else {}  # not a column for each client
            rows.append(row | dropped)
        return pandas.json_normalize(rows) if rows else pandas.DataFrame({"round": []})

    def plot(self, *names: str) -> Figures:
        """Return figures by name, by default those of the end of a run; ``fedssl-report --figures`` has all names."""
        with _as_sentence(), restored_torch():
            from fedssl.datasets.base import find_changes
            from fedssl.plots.registry import draw_plots

            find_changes()
            words = _words((), None, self._config_dirs, {})
            return Figures(draw_plots(read_run(self.path), names, overrides=words))

    @cached_property
    def encoder(self) -> "torch.nn.Module":
        """The encoder in eval mode, a torch module with `preprocess`, see `fedssl.export.load_encoder`."""
        with _as_sentence(), restored_torch():
            from fedssl.export import load_user_encoder

            return load_user_encoder(self._encoder_file("fedssl.export.load_encoder"), self._config_dirs)

    def _encoder_file(self, function: str) -> Path:
        """Return the file of the run's only encoder; `InputError` names ``function`` if there are several."""
        from fedssl.config.commands import encoder_file

        several = sorted(self.path.glob("encoder-*.pt"))
        if several and not (self.path / "encoder.pt").exists():
            raise InputError(
                f"{self.path} has {len(several)} encoders; load one of them with {function}({str(several[0])!r})"
            )
        return encoder_file(self.path)

    @overload
    def embed(self, images: np.ndarray, *, device: str = "auto", skip_unreadable: bool = False) -> np.ndarray: ...

    @overload
    def embed(self, images: PathLike, *, device: str = "auto", skip_unreadable: bool = False) -> "Embeddings": ...

    def embed(
        self, images: np.ndarray | PathLike, *, device: str = "auto", skip_unreadable: bool = False
    ) -> "np.ndarray | Embeddings":
        """Return the features of images ``(n, channels, size, size)``, float32 ``(n, dimension)``.

        Of a file, a folder or a pattern return the features with names and labels, see `fedssl.embedding.Embeddings`.
        Unreadable images are an error, or are left out with ``skip_unreadable``.
        """
        with _as_sentence(), restored_torch():
            from fedssl.embedding import embed_path, load_embedder

            file = self._encoder_file("fedssl.embedding.load_embedder")
            embedder = load_embedder(file, device=device, folders=self._config_dirs)
            if isinstance(images, np.ndarray):
                return embedder(images)
            if not isinstance(images, str | os.PathLike):
                raise InputError(
                    f"images are a {type(images).__name__}, but embed takes a NumPy array or the path of a file or "
                    "folder; for others call run.encoder(run.encoder.preprocess(images))"
                )
            return embed_path(embedder, os.fspath(images), skip_unreadable=skip_unreadable)

    def evaluate(self, *overrides: str, path: PathLike | None = None, **settings: Value) -> dict[str, float]:
        """Evaluate the encoder as ``fedssl-evaluate`` does, e.g. ``run.evaluate(evaluation="linear", path="labeled")``.

        Return each result, and its standard deviation under its name with suffix ``_std``. ``encoder=FILE`` and a
        ``dataset`` select one of several encoders.
        """
        with _as_sentence(), restored_torch():
            from fedssl.datasets.base import find_changes
            from fedssl.evaluation.cli import evaluate_encoder
            from fedssl.evaluation.scores import to_flat_dict

            words = _words(overrides, path, self._config_dirs, settings)
            of_file = any(word.startswith("encoder=") for word in words)
            own = [] if of_file else [f"run={quote_value(str(self.path))}"]
            find_changes()
            return to_flat_dict(evaluate_encoder([*own, *words]).results)


def _words(
    overrides: Sequence[str],
    path: PathLike | None,
    config_dir: PathLike | Sequence[PathLike],
    settings: dict[str, Value],
) -> list[str]:
    """Return the overrides of arguments as described in `run`."""
    folders = [config_dir] if isinstance(config_dir, str | os.PathLike) else config_dir
    flags = [word for folder in folders for word in ("--config-dir", os.fspath(folder))]
    data = {} if path is None else {"dataset.path": path}
    return expand_config_dir_flag([*flags, *to_overrides(overrides, {**data, **settings})])


@contextmanager
def _as_sentence() -> Iterator[None]:
    """Translate errors of files and memory into one of ours."""
    try:
        yield
    except Exception as error:
        shown = shown_error(error)
        if shown is None or shown is error:
            raise
        raise shown from error
