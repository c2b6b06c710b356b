"""The command ``fedssl``: a run, or a sweep with ``-m``.

The command line has Hydra's syntax. Exit status: 0 if all runs finished, 1 if a run failed, 2 for an invalid setting,
130 after Ctrl-C.
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

from fedssl.machine.process import OPENMP_ENV

# before flwr is imported: no telemetry
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.update(OPENMP_ENV | os.environ)  # before torch is imported

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedssl.atomic_files import new_run_folder, write_text
from fedssl.command_line import run_command
from fedssl.config.compose import compose_unresolved, validate_names
from fedssl.config.load import compose, load_settings, with_run_folder
from fedssl.config.overrides import CONF, config_groups, parse, quote_value
from fedssl.config.settings import Settings
from fedssl.config.targets import SEARCHPATH_KEY, expand_config_dir_flag, search_folders
from fedssl.errors import InputError, RunError
from fedssl.runs.run import acquire_lock, is_locked, read_summary
from fedssl.untrusted import sanitize

DATASETS = ("dataset", "calibration.dataset")


class SweepState:
    """Outcome of a run or sweep. Hydra discards the results of jobs, and prints a traceback if a job raises.

    ``jobs`` are the folders of a sweep's jobs. ``lock`` locks its folder for readers that wait for more jobs.
    """

    def __init__(self) -> None:
        self.jobs: list[Path] = []
        self.errors: list[Exception] = []
        self.lock: TextIO | None = None

    def run_job(self, hydra_settings: DictConfig) -> None:
        """Execute the run, or a job of a sweep. A failed job does not end the sweep."""
        chosen = HydraConfig.get().overrides
        searchpath = [override for override in chosen.hydra if override.startswith(f"{SEARCHPATH_KEY}=")]
        overrides = [*searchpath, *chosen.task]
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
        except Exception as error:  # errors are reported at the end
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
    """Execute the command line, and return the exit status of a sweep."""
    arguments = sys.argv[1:] = expand_config_dir_flag(sys.argv[1:])
    overrides = _overrides(arguments)
    validate_names(overrides)
    # Hydra's own code for these two flags composes the config again.
    if arguments in (["--help", *overrides], ["-h", *overrides], [*overrides, "--help"], [*overrides, "-h"]):
        print(_help_text(overrides), end="")
        return 0
    if arguments in (["--cfg", "job", *overrides], [*overrides, "--cfg", "job"]):
        print(OmegaConf.to_yaml(compose_unresolved(overrides)[0]), end="")
        return 0
    if {"-m", "--multirun"} & set(arguments) and {"--cfg", "-c"} & set(arguments):
        raise InputError("--cfg shows the settings of one run; remove -m and the swept values")

    def job(hydra_settings: DictConfig) -> None:  # Hydra names the application after this file
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


def _help_text(overrides: Sequence[str]) -> str:
    config, _ = compose_unresolved(overrides)
    choices: dict[str, list[str]] = {}
    for group, names in config_groups(search_folders(overrides)).items():
        for name in names:
            folder, _, choice = f"{group}/{name}".rpartition("/")
            choices.setdefault(folder, []).append(choice)
    lines = "\n".join(f"{folder}: {', '.join(choices[folder])}" for folder in sorted(choices))
    return f"""fedssl [-m] [group=choice ...] [key=value ...]

-m runs every combination of choices and values that are separated by commas. --cfg job prints the settings of a run.
--hydra-help lists the other flags of Hydra (https://hydra.cc).

== Groups and their choices ==

{lines}

== Settings ==

{OmegaConf.to_yaml(config)}"""


def run(overrides: Sequence[str]) -> None:
    """Run on the engine of the settings."""
    settings = compose(overrides) if _is_remote_resume(overrides) else load_settings(overrides)
    if settings.engine.name == "deployment":
        from simulation.deployment import run_deployment

        run_deployment(overrides, engine=settings.engine)
        return
    settings.recording.tracker.instantiate()  # reports a missing package before any work
    given = settings.recording.folder
    fresh = given is None or not given.exists()
    folder = given or new_run_folder()
    try:
        _run_here(with_run_folder(settings, folder, paths=_dataset_paths(settings)))
    except InputError:
        if fresh and not _rounds_done(folder) and not is_locked(folder):  # by a concurrent run in the same folder
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except KeyboardInterrupt as stop:
        done = _rounds_done(folder)
        if not done:
            raise
        resume = shlex.quote(f"resume={folder}")
        raise KeyboardInterrupt(f" after round {done}; continue with: fedssl {resume}") from stop


def _rounds_done(folder: Path) -> int:
    rounds = (read_summary(folder / "summary.json") or {}).get("rounds")
    return rounds if isinstance(rounds, int) else 0


def _dataset_paths(settings: Settings) -> dict[str, str]:
    """Return the absolute paths of the data sets, because resumed runs may have another working directory."""
    paths = {f"{key}.path": OmegaConf.select(settings.recording.config, f"{key}.path") for key in DATASETS}
    return {key: path for key, path in paths.items() if path}


def _run_here(settings: Settings) -> None:
    """Run on this machine or a Ray cluster."""
    engine, concurrency = settings.engine.name, settings.clients_per_round
    if engine == "auto":
        from simulation.resources import auto_engine

        choice = auto_engine(settings)
        engine, concurrency = choice.engine, choice.concurrency
        print(f"engine={engine}: {choice.reason}", flush=True)
    if engine == "ray":
        from simulation.ray_grid import run_ray

        run_ray(settings, concurrency=concurrency)
    else:
        from simulation.grid import run_local

        run_local(settings)


def _is_remote_resume(overrides: Sequence[str]) -> bool:
    """Return whether the folder of the run to resume is on the machine of a SuperLink."""
    explicit = {override.key_or_group: override.value() for override in parse(overrides)}
    folder = explicit.get("resume")
    return folder is not None and explicit.get("engine") == "deployment" and not Path(str(folder)).exists()


def print_table(folders: Sequence[Path]) -> None:
    """Print the table of a sweep, and write it to the folder of the sweep as CSV and Markdown."""
    from fedssl.report.accuracy_table import sweep_table

    table = sweep_table(folders)
    try:
        table.write(folders[0].parent)
    except OSError as error:
        raise RunError(f"{folders[0].parent} cannot be written ({error.strerror}); free disk space") from error
    print(f"\n{table.text()}\n\nresults.csv and results.md are in {folders[0].parent}")


def _overrides(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without Hydra's flags and their values."""
    flags_with_value = ("--cfg", "-c", "--package", "-p", "--config-name", "-cn", "--info", "-i")
    pairs = zip(["", *arguments], arguments, strict=False)
    return [argument for before, argument in pairs if not argument.startswith("-") and before not in flags_with_value]


def _complete_summary(folder: Path, overrides: Sequence[str], *, status: str, reason: str) -> None:
    """Write the outcome into the summary of a run that could not do so itself."""
    summary = folder / "summary.json"
    content = read_summary(summary) or {"overrides": list(overrides), "rounds": 0}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(summary, json.dumps({**content, "status": status, "reason": reason}, indent=2) + "\n")


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
