"""The command ``fedssl``: a run, or a sweep with ``-m``.

Hydra parses the command line (``-m``, ``--cfg job``, ``--help``). Exit status: 0 if all runs finished, 1 if one failed,
2 for an invalid setting, 130 after Ctrl-C.
"""

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from fedssl.machine.threads import OPENMP_ENV

# Before flwr is imported: a run sends no telemetry.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.update(OPENMP_ENV | os.environ)  # before torch is imported

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from fedssl.atomic_files import new_run_folder, write_text
from fedssl.command_line import run_command
from fedssl.config.compose import validate_names
from fedssl.config.load import compose, load_settings
from fedssl.config.overrides import CONF, parse, quote_value
from fedssl.config.settings import Settings
from fedssl.config.targets import SEARCHPATH_KEY, expand_config_dir_flag
from fedssl.errors import InputError, RunError
from fedssl.runs.run import acquire_lock, is_locked, read_summary
from fedssl.untrusted import sanitize


class SweepState:
    """Outcome of the run, or of the jobs of a sweep.

    Hydra discards the results of a sweep and prints a traceback if a job raises.

    Attributes
    ----------
    jobs : list of Path
        Folders of the jobs of a sweep.
    errors : list of Exception
    lock : TextIO or None
        Lock on the folder of a running sweep, for readers that wait for further jobs.
    """

    def __init__(self) -> None:
        self.jobs: list[Path] = []
        self.errors: list[Exception] = []
        self.lock: TextIO | None = None

    def run_job(self, hydra_settings: DictConfig) -> None:
        """Run, or run one job of a sweep, whose failure must not end the others."""
        chosen = HydraConfig.get().overrides
        overrides = [
            *(override for override in chosen.hydra if override.startswith(f"{SEARCHPATH_KEY}=")),
            *chosen.task,
        ]
        sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        folder = Path(HydraConfig.get().runtime.output_dir).resolve()
        if sweep:
            if not self.jobs:
                self.lock = acquire_lock(folder.parent)
            self.jobs.append(folder)
            print(f"\n[job {folder.name}] {' '.join(chosen.task)}", flush=True)
        existed = (folder / "config.yaml").exists()
        try:
            run([*overrides, f"output_dir={quote_value(str(folder))}"] if sweep else overrides)
        except Exception as error:  # failed jobs are listed at the end
            self.errors.append(error)
            if sweep:
                print(f"[job {folder.name}] failed: {sanitize(error)}", flush=True)
                if not existed:
                    with suppress(OSError):  # the disk may be full
                        _complete_summary(folder, overrides, status="failed", reason=str(error))


def main() -> None:
    """Entry point of the command line."""
    signal.signal(signal.SIGTERM, _interrupt)
    state = SweepState()
    status = run_command("fedssl", lambda: _run_all(state))
    if status or state.jobs:
        sys.exit(status)


def _run_all(state: SweepState) -> int:
    """Run the command line, and return the exit status of a sweep."""
    sys.argv[1:] = expand_config_dir_flag(sys.argv[1:])
    validate_names(_overrides(sys.argv[1:]))
    if {"-m", "--multirun"} & set(sys.argv[1:]) and {"--cfg", "-c"} & set(sys.argv[1:]):
        raise InputError("--cfg shows the settings of one run; remove -m and the swept values")

    def job(hydra_settings: DictConfig) -> None:  # a function of this file, by which Hydra names the application
        state.run_job(hydra_settings)

    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    if state.jobs:
        print_table(state.jobs)
        return 1 if state.errors else 0
    if state.errors:
        error = state.errors[0]
        if isinstance(error, BrokenPipeError):  # the run did not finish
            raise RunError("standard output was closed before the run had ended") from error
        raise error
    return 0


def run(overrides: Sequence[str]) -> None:
    """Run on the engine of the settings."""
    settings = compose(overrides) if _is_remote_resume(overrides) else load_settings(overrides)
    if settings.engine.name == "deployment":
        from simulation.deployment import run_deployment

        run_deployment(overrides, engine=settings.engine)
        return
    settings.recording.tracker.instantiate()  # a missing package is an error before any work
    given = settings.recording.folder
    fresh = given is None or not given.exists()
    folder = given or new_run_folder()
    try:
        _run_here(settings, folder)
    except InputError:
        if fresh and not _rounds_done(folder) and not is_locked(folder):  # by a concurrent run in the same folder
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except KeyboardInterrupt as stop:
        done = _rounds_done(folder)
        if not done:
            raise
        goes_on = f"continue with: fedssl {shlex.quote(f'resume={folder}')}"
        raise KeyboardInterrupt(f" after round {done}; {goes_on}") from stop


def _rounds_done(folder: Path) -> int:
    rounds = (read_summary(folder / "summary.json") or {}).get("rounds")
    return rounds if isinstance(rounds, int) else 0


def _run_here(settings: Settings, folder: Path) -> None:
    """Run into this folder, on this machine or a Ray cluster."""
    overrides = [*settings.recording.overrides, f"output_dir={quote_value(str(folder))}"]
    data = {"dataset": settings.data}
    if settings.calibration is not None and settings.calibration.has_own_dataset:
        data["calibration.dataset"] = settings.calibration.data
    for key, settings_of_data in data.items():
        path = settings_of_data.reader.values.get("path")
        if path:  # absolute, because Ray and resumed runs have another working directory
            overrides = [override for override in overrides if override.partition("=")[0] != f"{key}.path"]
            overrides.append(f"{key}.path={quote_value(path)}")
    engine, concurrency = settings.engine.name, settings.clients_per_round
    if engine == "auto":
        from simulation.resources import auto_engine

        choice = auto_engine(settings)
        engine, concurrency = choice.engine, choice.concurrency
        print(f"engine={engine}: {choice.reason}", flush=True)
    if engine == "ray":
        from simulation.ray_grid import run_ray

        run_ray(
            overrides,
            num_clients=settings.num_clients,
            concurrency=concurrency,
            folder=folder,
            engine=settings.engine,
            machine=settings.machine,
        )
    else:
        from simulation.grid import run_local

        run_local(overrides, num_clients=settings.num_clients, machine=settings.machine)


def _is_remote_resume(overrides: Sequence[str]) -> bool:
    """Return whether the run to resume is on the machine of a SuperLink, which alone has its folder."""
    explicit = {override.key_or_group: override.value() for override in parse(overrides)}
    folder = explicit.get("resume")
    return folder is not None and explicit.get("engine") == "deployment" and not Path(str(folder)).exists()


def print_table(folders: Sequence[Path]) -> None:
    """Print the table of a sweep, and write it as CSV and Markdown into the folder of the sweep."""
    from fedssl.report.accuracy_table import sweep_table

    table = sweep_table(folders)
    try:
        table.write(folders[0].parent)
    except OSError as error:
        raise RunError(f"{folders[0].parent} cannot be written ({error.strerror}); free disk space") from error
    print(f"\n{table.text()}\n\nresults.csv and results.md are in {folders[0].parent}")


def _overrides(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that are settings, without Hydra's flags (``-m``, ``--cfg``) and their values (``job``)."""
    flags_with_value = ("--cfg", "-c", "--package", "-p", "--config-name", "-cn", "--info", "-i")
    pairs = zip(["", *arguments], arguments, strict=False)
    return [argument for before, argument in pairs if not argument.startswith("-") and before not in flags_with_value]


def _complete_summary(folder: Path, overrides: Sequence[str], *, status: str, reason: str) -> None:
    """Write how the run ended into its summary, if the run did not start or could not write it."""
    summary = folder / "summary.json"
    content = read_summary(summary) or {"overrides": list(overrides), "rounds": 0}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(summary, json.dumps({**content, "status": status, "reason": reason}, indent=2) + "\n")


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
