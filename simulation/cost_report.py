"""The output of ``fedssl plan=true``: the cost of a run, or of every job of a sweep."""

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from omegaconf import OmegaConf

from fedssl.config.load import load_settings
from fedssl.errors import InputError
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.machine.process import available_cores, process_age
from fedssl.text_table import align
from server_app.console import duration
from simulation.cost import CostEstimate, estimate_cost
from simulation.parallel_jobs import JobTask
from simulation.resources import RAY_OVERHEAD_SECONDS
from simulation.sweep import job_overrides
from simulation.sweep_state import Job

RAY_MEMORY_SHARE = 0.7  # of the available memory, for tasks; the rest is for Ray's objects
LISTED = 4  # jobs in a row of the table
_WITHOUT_COST = ("seed", "output_dir", "run_id")  # and the learning rate
_FIRST_JOB = "the numbers of a row are those of its first job, and depend on the seed"


def print_cost(overrides: Sequence[str]) -> None:
    """Print the cost of a run; raises `InputError` if it is invalid or cannot be estimated."""
    startup = process_age()
    print(format_cost(estimate_cost(overrides), startup=startup))


def format_cost(cost: CostEstimate, *, startup: float) -> str:
    """Return the cost of a run as text; ``startup`` seconds are needed before its settings are read."""
    rounds, updates = cost.rounds, sum(counts.clients for counts in cost.rounds)
    clients = f"{_range([counts.clients for counts in rounds])} of {cost.num_clients} clients"
    memory = f"{gigabytes(cost.memory)} of one process"
    if cost.worker_memory:
        workers = f"{_number(cost.engine.concurrency, 'worker')} with {gigabytes(cost.worker_memory)} each"
        memory = f"{gigabytes(cost.memory)}: server {gigabytes(cost.server_memory)}, {workers}"
    per_round = sum(cost.round_seconds) / len(rounds)
    shown = f"{per_round:.2g} s" if per_round < 10 else duration(per_round)
    lines = [
        ["engine", f"{cost.engine.engine}, {_number(cost.engine.concurrency, 'client')} at once"],
        ["rounds", f"{len(rounds)}, each with {clients}"],
        ["steps", f"{_range([counts.steps for counts in rounds])} per round, {cost.steps:,} in total"],
        ["download", _bytes([counts.bytes_down for counts in rounds], updates)],
        ["upload", _bytes([counts.bytes_up for counts in rounds], updates)],
        ["memory", memory],
        ["time", f"{shown} per round, {duration(startup + cost.seconds)} in total"],
        *(["note", note] for note in cost.notes),
    ]
    return align(lines, left=2)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _bytes(sizes: Sequence[int], updates: int) -> str:
    return f"{sum(sizes) / updates:,.0f} bytes per client and round, {sum(sizes):,} in total"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def print_sweep_cost(jobs: Sequence[Job], tasks: Mapping[Path, JobTask] | None, *, limit: int | None) -> int:
    """Print the cost of the jobs of a sweep, and of all. Return the exit status, which is 2 if a job is rejected.

    ``tasks`` are the jobs that run in parallel, by folder, at most ``limit`` at once; None: one after the other. Jobs
    that differ in seeds and learning rates share a row, with the cost of the first one.
    """
    startup, rejected = process_age(), []
    rows: dict[str, list[Job]] = {}
    costs: dict[str, CostEstimate] = {}
    for job in jobs:
        overrides = job_overrides(tasks[job.folder].job if tasks else job)
        try:
            key = cost_key(overrides)
            costs[key] = costs.get(key) or estimate_cost(overrides)
            rows.setdefault(key, []).append(job)
        except InputError as error:
            rejected.append(f"{job.name} is rejected: {error}")
    if rows:
        common = set[str].intersection(*(set(job.overrides) for job in jobs))
        lines = [_row(group, costs[key], common) for key, group in rows.items()]
        print(align([["jobs", "settings", "steps", "bytes", "memory", "time"], *lines], left=2))
        valid = [job for group in rows.values() for job in group]
        concurrency = concurrent_jobs([tasks[job.folder] for job in valid], limit=limit) if tasks else 1
        work = sum(costs[key].seconds * len(group) for key, group in rows.items())
        longest = max(cost.seconds for cost in costs.values())
        total = startup + max(work / concurrency, longest) + bool(tasks) * RAY_OVERHEAD_SECONDS
        print(f"\n{_number(len(valid), 'job')}, {concurrency} at once, {duration(total)} in total")
        notes = [_FIRST_JOB] if len(valid) > len(rows) else []
        notes += dict.fromkeys(note for cost in costs.values() for note in cost.notes)
        print("".join(f"note: {note}\n" for note in notes), end="")
    print("".join(f"{line}\n" for line in rejected), end="")
    return 2 if rejected else 0


def cost_key(overrides: Sequence[str]) -> str:
    """Return the settings that jobs of one row share."""
    config = OmegaConf.to_container(load_settings(overrides).recording.config)
    assert isinstance(config, dict)
    optimizer = {name: value for name, value in config["optimizer"].items() if name != "lr"}
    kept = {name: value for name, value in config.items() if name not in _WITHOUT_COST}
    return json.dumps({**kept, "optimizer": optimizer}, sort_keys=True)


def concurrent_jobs(tasks: Sequence[JobTask], *, limit: int | None) -> int:
    """Return how many jobs Ray runs at once: as many as cores and memory allow, at most ``limit``."""
    fitting = max(1, available_cores() // max(task.cpus for task in tasks))
    available = available_memory()
    if available is not None:
        fitting = min(fitting, max(1, int(RAY_MEMORY_SHARE * available) // max(task.memory for task in tasks)))
    return min(fitting, len(tasks), limit or len(tasks))


def _row(jobs: Sequence[Job], cost: CostEstimate, common: Set[str]) -> list[str]:
    numbers = ", ".join(job.folder.name for job in jobs[:LISTED])
    more = f" and {len(jobs) - LISTED} more" if len(jobs) > LISTED else ""
    shared = set[str].intersection(*(set(job.overrides) for job in jobs)) - common
    settings = " ".join(override for override in jobs[0].overrides if override in shared)
    amounts = [f"{cost.steps:,}", f"{cost.bytes:,}", gigabytes(cost.memory), duration(cost.seconds)]
    return [numbers + more, settings, *amounts]
