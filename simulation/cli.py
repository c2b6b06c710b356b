"""The command ``fedssl``: a run, or a sweep with ``-m``.

The command line has Hydra's syntax. Exit status: 0 if all runs finished, 1 if a run failed, 2 for an invalid setting,
128 + the number of a signal, e.g. 130 after Ctrl-C.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fedssl.command_line import run_command
from fedssl.config.compose import compose_unresolved, validate_names
from fedssl.config.hydra_internals import run_main, split_arguments
from fedssl.config.literal import literal_values, user_path
from fedssl.config.load import compose
from fedssl.config.overrides import CONF, by_key, check_single, check_sweep, config_groups, parse, quote_value
from fedssl.config.targets import SEARCHPATH_KEY, expand_config_dir_flag, search_folders
from fedssl.errors import InputError, RunError
from fedssl.runs.run import read_run, run_folders
from simulation.axes import axes_of
from simulation.parallel_jobs import parallel_tasks, run_in_parallel
from simulation.pruning import check_metric, pruning_of, successive_halving
from simulation.run import run
from simulation.sweep import (
    JobWave,
    check_any_valid,
    finish_sweep,
    folder_to_resume,
    needs_hydra,
    new_sweep_folder,
    remove_incomplete,
    run_job,
    run_jobs,
    split_plan,
    sweep_lock,
    waiting_jobs,
)
from simulation.sweep_progress import SweepProgress
from simulation.sweep_state import FOLDER_KEY, STATE_FILE, Job, plan_jobs, split_options


def main() -> int:
    """Run the command and return its exit status, see `run_command`."""
    return run_command("fedssl", _run_all)


def _run_all() -> int:
    """Execute the command line, and return the exit status of a sweep."""
    flags, overrides = split_arguments(expand_config_dir_flag(sys.argv[1:]))
    is_sweep = bool({"-m", "--multirun"} & set(flags))
    overrides = literal_values(overrides, sweep=is_sweep)
    if "resume" not in by_key(overrides):  # else by the choices of the run or the sweep that is resumed
        validate_names(overrides)
    # Hydra's own code for these two flags composes the config again.
    if flags in (["--help"], ["-h"]):
        print(_help_text(overrides), end="")
        return 0
    if flags == ["--cfg", "job"]:
        print(OmegaConf.to_yaml(compose_unresolved(overrides)[0]), end="")
        return 0
    is_plan, overrides = split_plan(overrides)
    if not is_sweep:
        check_single(overrides)
    if is_plan:
        return _plan(flags, overrides, is_sweep=is_sweep)
    if not flags:
        _run_single(overrides)
        return 0
    if is_sweep:
        check_sweep(overrides)
        return _run_hydra_sweep(overrides) if needs_hydra(overrides) else _run_sweep(overrides)
    sys.argv[1:] = [*flags, *overrides]

    def job(hydra_settings: DictConfig) -> None:  # Hydra names the application after this file
        _run_single(overrides)

    run_main(job, CONF)
    return 0


def _run_single(overrides: Sequence[str]) -> None:
    for override in parse(overrides):
        if override.key_or_group in ("hydra.run.dir", "hydra.sweep.dir"):
            raise InputError(f"{override.input_line} is for sweeps; set output_dir=FOLDER for a single run")
        if override.key_or_group == "resume" and _has_sweep(user_path(str(override.value()))):
            raise InputError(f"{override.input_line} is the folder of a sweep; add -m")
    try:
        run(overrides)
    except BrokenPipeError as error:  # the run did not finish
        raise RunError("standard output was closed before the run had ended") from error


def _has_sweep(folder: Path) -> bool:
    return os.path.exists(folder / STATE_FILE)  # noqa: PTH110 - that of pathlib raises without permission


def _run_sweep(overrides: Sequence[str]) -> int:
    """Run or resume a sweep, and return its exit status."""
    options, overrides = split_options(overrides)
    resumed = folder_to_resume(overrides)
    if resumed and (other := by_key(overrides).get(FOLDER_KEY)):
        raise InputError(f"{other} but resume={resumed} continues in its folder; leave out {FOLDER_KEY}")
    folder = resumed or new_sweep_folder(overrides)
    with sweep_lock(folder):
        new = [override for override in overrides if not (resumed and override.startswith("resume="))]
        state = plan_jobs(folder, new, options)
        jobs = state.jobs_in(folder)
        if not resumed:
            check_any_valid(jobs)
        pruning = pruning_of(state, jobs)
        waiting = waiting_jobs(jobs, retry=options.get("retry", False))
        limit, address = options.get("jobs"), options.get("address")
        tasks = parallel_tasks(waiting, limit=limit, address=address, gpus=options.get("gpus", 1))
        state.save(folder)
        if resumed:
            remove_incomplete(waiting)
        progress = SweepProgress([job.folder for job in waiting], metric=state.options.get("metric"))
        batches = successive_halving(jobs, waiting, pruning, progress) if pruning else [JobWave(waiting)]
        try:
            if tasks is None:
                run_jobs(batches, run, progress)
            else:
                run_in_parallel(batches, tasks, progress, limit=limit, address=address)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f"; continue with: {state.resume_command(folder)}") from stop
        return finish_sweep(folder, [job.folder for job in jobs], metric=state.options.get("metric"))


def _plan(flags: Sequence[str], overrides: Sequence[str], *, is_sweep: bool) -> int:
    """Print the cost of a run or of a new sweep, and return the exit status."""
    from simulation.cost_report import print_cost, print_sweep_cost  # slow import

    if needs_hydra(overrides) if is_sweep else flags:
        raise InputError("plan=true cannot estimate what Hydra's sweepers, launchers and flags run; leave these out")
    if not is_sweep:
        print_cost(overrides)
        return 0
    check_sweep(overrides)
    options, overrides = split_options(overrides)
    if any(override.startswith("resume=") for override in overrides):
        raise InputError("plan=true estimates a new sweep; leave out resume")
    if options.get("address") is not None:
        raise InputError("plan=true estimates a sweep on this machine; leave out sweep.address")
    folder = new_sweep_folder(overrides, create=False)
    jobs = plan_jobs(folder, overrides, options).jobs_in(folder)
    limit = options.get("jobs")
    tasks = parallel_tasks(jobs, limit=limit, address=None, gpus=options.get("gpus", 1))
    return print_sweep_cost(jobs, tasks, limit=limit)


def _run_hydra_sweep(overrides: Sequence[str]) -> int:
    """Run a sweep by another sweeper or launcher of Hydra, and return its exit status."""
    options, overrides = split_options(overrides)
    if unused := options.keys() - {"metric"}:
        raise InputError(
            f"sweep.{min(unused)} has no effect here; Hydra itself runs the jobs of this sweep: use its settings"
        )
    for override in parse(overrides):
        if override.key_or_group == "hydra.sweep.subdir" and "${" not in str(override.value()):
            raise InputError(
                f"{override.input_line} is the same folder for all jobs; use an interpolation, e.g. "
                "'hydra.sweep.subdir=${hydra.job.num}', or leave it out"
            )
    if folder_to_resume(overrides) is not None:
        raise InputError("a sweep of Hydra's sweepers and launchers cannot be resumed; leave out resume or these")
    if axes_of(overrides, options):
        raise InputError("Hydra itself runs the jobs of this sweep, without sweep.axes; leave out Hydra's settings")
    metric = options.get("metric")
    if metric is not None:
        fixed = [
            str(override.input_line)
            for override in parse(overrides)
            if not override.is_sweep_override()
            and (override.key_or_group == SEARCHPATH_KEY or not override.key_or_group.startswith("hydra"))
        ]
        check_metric(metric, [compose(fixed)], final=True)
    folder = new_sweep_folder(overrides)
    sys.argv[1:] = ["-m", *overrides, f"{FOLDER_KEY}={quote_value(str(folder))}"]

    def job(hydra_settings: DictConfig) -> float | None:
        return _run_hydra_job(metric)

    with sweep_lock(folder):
        run_main(job, CONF)
        return finish_sweep(folder, run_folders(folder), metric=metric)


def _run_hydra_job(metric: str | None) -> float | None:
    """Run the job that Hydra has started, and return its metric; None without one, or if the job failed."""
    hydra_config = HydraConfig.get()
    # Without resolution of interpolations, which refer to the settings of the job.
    overrides: Any = OmegaConf.to_container(hydra_config.overrides, resolve=False)
    searchpath = [override for override in overrides["hydra"] if override.startswith(f"{SEARCHPATH_KEY}=")]
    job = Job(Path(hydra_config.runtime.output_dir).resolve(), (*searchpath, *overrides["task"]))
    print(f"\n{job.name} {' '.join(job.overrides)}", flush=True)
    reason = run_job(job, run)
    if reason is not None:
        print(f"{job.name} failed: {reason}", flush=True)
    finished = read_run(job.folder)
    return finished.metric(metric) if metric and finished.finished else None


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
