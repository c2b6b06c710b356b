"""One run on the engine of its settings, which the command, sweeps and tests call."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from fedssl.atomic_files import make_output_folder, new_run_folder, saved_rounds
from fedssl.config.literal import absolute_setting, user_path
from fedssl.config.load import compose, load_settings
from fedssl.config.overrides import parse
from fedssl.config.saved_run import resume_command, resume_overrides
from fedssl.config.settings import MachineSettings, Settings
from fedssl.errors import InputError, RunError, RunStopped
from fedssl.logs import print_line
from fedssl.runs.run import is_locked, read_summary
from simulation.resources import (
    EngineChoice,
    check_local_cuda,
    check_local_resources,
    choose_on_cpus,
    choose_on_gpus,
    server_on_gpus,
)

if TYPE_CHECKING:  # a slow import
    from server_app.build import RunComponents

_DATASETS = ("dataset.path", "calibration.dataset.path")


def run(overrides: Sequence[str]) -> Path | None:
    """Run on the engine of the settings, and return the run folder; None if it is on another machine."""
    return run_settings(settings_of(overrides), overrides)


def settings_of(overrides: Sequence[str]) -> Settings:
    """Return the settings of a new or resumed run."""
    return compose(overrides) if _is_remote_resume(overrides) else load_settings(overrides)


def run_settings(settings: Settings, overrides: Sequence[str]) -> Path | None:
    """Run with the settings of the overrides, see `run`."""
    if settings.engine.name == "deployment":
        from simulation.deployment import run_deployment, validate

        if not settings.recording.resumed:
            validate(settings)
        return run_deployment(overrides, engine=settings.engine)
    check_local_resources(settings)
    built = _build(settings)
    chosen = settings.recording.folder
    fresh = chosen is None or not chosen.exists()
    folder = chosen or new_run_folder()
    make_output_folder(folder)
    try:
        _run_here(built.in_folder(folder, paths=_given_paths(settings)))
    except (InputError, RunError) as error:
        # A concurrent run may have locked the folder.
        if fresh and not is_locked(folder) and _is_removable(folder, rejected=isinstance(error, InputError)):
            shutil.rmtree(folder, ignore_errors=True)
            if chosen is None:
                with suppress(OSError):  # other runs are in it
                    folder.parent.rmdir()
        raise
    except KeyboardInterrupt as stop:
        done = _rounds_done(folder)
        if not done:
            if fresh:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
            raise
        message = f" after round {done}; continue with: {resume_command(folder)}"
        raise RunStopped(message, rounds=done, overrides=resume_overrides(folder)) from stop
    return folder


def run_again(settings: Settings, overrides: Sequence[str]) -> Path | None:
    """Run as `run_settings` in a process in which other runs may have ended, and images have changed since."""
    from client_app.worker import release_worker  # slow imports
    from fedssl.datasets.base import find_changes

    find_changes()
    release_worker()
    return run_settings(settings, overrides)


def _is_removable(folder: Path, *, rejected: bool) -> bool:
    """Return whether a run was rejected before its first round, or failed before its settings were saved."""
    recorded = [file for file in folder.glob("metrics.jsonl") if file.stat().st_size]
    has_rounds = _rounds_done(folder) or saved_rounds(folder / "checkpoints") or recorded
    return not has_rounds if rejected else not (folder / "config.yaml").exists()


def _rounds_done(folder: Path) -> int:
    rounds = (read_summary(folder / "summary.json") or {}).get("rounds")
    return rounds if isinstance(rounds, int) else 0


def _given_paths(settings: Settings) -> dict[str, str]:
    """Return the absolute paths of overrides and data sets, because resumed runs may have another working directory."""
    keys = [override.partition("=")[0] for override in settings.recording.overrides]
    config, names = settings.recording.config, {key: key.lstrip("+") for key in [*keys, *_DATASETS]}
    paths = {key: absolute_setting(name, OmegaConf.select(config, name)) for key, name in names.items()}
    return {key: path for key, path in paths.items() if path is not None}


@dataclass(frozen=True)
class BuiltRun:
    """A run before its start: its components, its engine, and what was logged so far."""

    components: "RunComponents"
    engine: EngineChoice
    machine: MachineSettings  # of the clients; on Ray the server may use another device
    records: Sequence[logging.LogRecord]

    def in_folder(self, folder: Path, *, paths: Mapping[str, str]) -> "BuiltRun":
        """Return the run in a folder. ``paths`` are recorded as overrides."""
        return replace(self, components=self.components.in_folder(folder, paths=paths))


def _build(settings: Settings) -> BuiltRun:
    """Build a run on this machine or a Ray cluster; raises `InputError` before anything starts."""
    from server_app.build import build_components
    from server_app.console import log_to_console
    from server_app.run_folder import check_new
    from server_app.statistics import with_statistics
    from simulation.grid import LocalGrid, load_client_app, simulated_clients

    check_new(settings.recording)
    settings.recording.tracker.instantiate()  # reports a missing package
    engine, machine = EngineChoice(settings.engine.name, settings.clients_per_round, ""), settings.machine
    if engine.engine == "auto":
        engine = choose_on_gpus(settings) or engine
    server = server_on_gpus(settings) if engine.engine == "ray" else settings
    with log_to_console() as records:
        components = with_statistics(
            build_components(server, simulated_clients(settings.num_clients)),
            lambda: LocalGrid(load_client_app(), num_clients=settings.num_clients),
        )
    if settings.engine.address is None:  # clients train on this machine
        check_local_cuda(settings)
    if engine.engine == "auto":
        engine = choose_on_cpus(settings)
    if engine.reason:
        print_line(f"engine={engine.engine}: {engine.reason}")
    return BuiltRun(components, engine, machine, records)


def _run_here(run: BuiltRun) -> None:
    if run.engine.engine == "ray":
        from simulation.ray_grid import run_ray  # slow imports
        from simulation.ray_session import RayNotStartedError

        try:
            run_ray(run.components, run.machine, concurrency=run.engine.concurrency, records=run.records)
            return
        except RayNotStartedError as error:
            if run.components.settings.engine.name != "auto":
                raise
            print_line(f"engine=local: Ray could not be started ({error.__cause__})")
    from simulation.grid import run_local

    run_local(run.components, run.records)


def _is_remote_resume(overrides: Sequence[str]) -> bool:
    """Return whether the folder of the run to resume is on the machine of a SuperLink."""
    explicit = {override.key_or_group: override.value() for override in parse(overrides)}
    folder = explicit.get("resume")
    return folder is not None and explicit.get("engine") == "deployment" and not user_path(str(folder)).exists()
