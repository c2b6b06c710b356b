"""The output of ``fedssl plan=true``: the cost of a run, or of every job of a sweep."""

import heapq
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from fedssl.errors import InputError
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.machine.process import available_cores, process_age
from fedssl.text_table import align
from server_app.console import duration
from simulation.parallel_jobs import JobTask
from simulation.plan import Plan, Planner
from simulation.resources import RAY_OVERHEAD_SECONDS
from simulation.sweep import Job, job_overrides

RAY_MEMORY_SHARE = 0.7  # of the available memory, for tasks; the rest is for Ray's objects
LISTED = 4  # jobs in a row of the table


def print_plan(overrides: Sequence[str]) -> None:
    """Print the cost of a run; raises `InputError` if it is invalid or does not fit."""
    startup = process_age()
    print(format_plan(Planner().plan(overrides), startup=startup))


def format_plan(plan: Plan, *, startup: float) -> str:
    """Return the cost of a run as text; ``startup`` seconds are needed before its settings are read."""
    rounds, steps = plan.rounds, [counts.steps for counts in plan.rounds]
    updates = sum(counts.clients for counts in rounds)
    clients = f"{_range([counts.clients for counts in rounds])} of {plan.num_clients} clients"
    lines = [
        ["engine", f"{plan.engine.engine}, {_number(plan.engine.concurrency, 'client')} at once"],
        ["rounds", f"{len(rounds)}, each with {clients}"],
        ["steps", f"{_range(steps)} per round, {sum(steps):,} in total"],
        ["download", _bytes([counts.bytes_down for counts in rounds], updates)],
        ["upload", _bytes([counts.bytes_up for counts in rounds], updates)],
        ["memory", _memory(plan)],
    ]
    if plan.step_memory is not None:
        lines.append(["", f"{gigabytes(plan.step_memory)} of tensors in a training step"])
    per_round = sum(plan.round_seconds) / len(rounds)
    shown = f"{per_round:.2g} s" if per_round < 10 else duration(per_round)
    lines.append(["time", f"{shown} per round, {duration(startup + plan.seconds)} in total"])
    if plan.disk:
        lines.insert(
            -1, ["disk", f"{gigabytes(plan.disk)} of checkpoints, updates, client states, snapshots and encoders"]
        )
    if plan.states:
        lines.insert(-1, ["", f"{gigabytes(plan.states)} of these are the newest client states"])
    notes = [f"upper bounds, because of {', '.join(plan.upper_bounds)}"] if plan.upper_bounds else []
    return "\n".join([align(lines, left=2), *notes, *plan.assumptions])


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _bytes(sizes: Sequence[int], updates: int) -> str:
    return f"{sum(sizes) / updates:,.0f} bytes per client and round, {sum(sizes):,} in total"


def _memory(plan: Plan) -> str:
    if not plan.worker_memory:
        return f"{gigabytes(plan.server_memory)} of one process"
    workers = f"{_number(plan.engine.concurrency, 'worker')} with {gigabytes(plan.worker_memory)} each"
    return f"{gigabytes(plan.memory)}: server {gigabytes(plan.server_memory)}, {workers}"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def print_sweep_plan(
    jobs: Sequence[Job], tasks: Mapping[Path, JobTask] | None, *, limit: int | None, prunes: bool = False
) -> int:
    """Print the cost of the jobs of a sweep, and of all. Return the exit status, which is 2 if a job is rejected.

    ``tasks`` are the jobs that run in parallel, by folder, at most ``limit`` at once; None: one after the other.
    ``prunes`` is whether jobs may end early. Jobs with the same cost share a row.
    """
    startup, planner = process_age(), Planner()
    plans: dict[Job, Plan] = {}
    rejected = []
    for job in jobs:
        try:
            plans[job] = planner.plan(job_overrides(tasks[job.folder].job if tasks else job))
        except InputError as error:
            rejected.append(f"{job.name} is rejected: {error}")
    if plans:
        print(align([["jobs", "settings", "steps", "bytes", "memory", "time"], *_rows(plans, jobs)], left=2))
        concurrency = concurrent_jobs([tasks[job.folder] for job in plans], limit=limit) if tasks else 1
        cpus = max(tasks[job.folder].cpus for job in plans) if tasks else 1
        slowdown = planner.slowdown(concurrency, cpus)
        total = startup + makespan([slowdown * plan.seconds for plan in plans.values()], concurrency)
        total += RAY_OVERHEAD_SECONDS if tasks else 0.0
        print(f"\n{_number(len(plans), 'job')}, {concurrency} at once, {duration(total)} in total")
        bounds = dict.fromkeys(name for plan in plans.values() for name in plan.upper_bounds)
        bounds |= {"sweep.reduction_factor": None} if prunes else {}
        notes = [f"upper bounds, because of {', '.join(bounds)}"] if bounds else []
        notes += dict.fromkeys(text for plan in plans.values() for text in plan.assumptions)
        print("".join(f"{line}\n" for line in notes), end="")
    print("".join(f"{line}\n" for line in rejected), end="")
    return 2 if rejected else 0


def concurrent_jobs(tasks: Sequence[JobTask], *, limit: int | None) -> int:
    """Return how many jobs Ray runs at once: as many as cores and memory allow, at most ``limit``."""
    fitting = max(1, available_cores() // max(task.cpus for task in tasks))
    available = available_memory()
    if available is not None:
        fitting = min(fitting, max(1, int(RAY_MEMORY_SHARE * available) // max(task.memory for task in tasks)))
    return min(fitting, len(tasks), limit or len(tasks))


def _rows(plans: Mapping[Job, Plan], jobs: Sequence[Job]) -> list[list[str]]:
    common = set[str].intersection(*(set(job.overrides) for job in jobs))
    rows: dict[object, list[Job]] = {}
    for job, plan in plans.items():
        steps, num_bytes, memory = plan.counts  # bytes depend on the length of a folder's name
        rows.setdefault((steps, gigabytes(num_bytes), memory, duration(plan.seconds)), []).append(job)
    return [
        [_numbers(group), _settings(group, common), *_cost([plans[job] for job in group])] for group in rows.values()
    ]


def _numbers(jobs: Sequence[Job]) -> str:
    """Return the numbers of jobs, of many only the first ones."""
    numbers = [job.folder.name for job in jobs]
    return ", ".join(numbers) if len(jobs) <= LISTED else f"{', '.join(numbers[:LISTED])} and {len(jobs) - LISTED} more"


def _settings(jobs: Sequence[Job], common: Set[str]) -> str:
    """Return the swept overrides that all of these jobs have."""
    shared = set[str].intersection(*(set(job.overrides) for job in jobs)) - common
    return " ".join(override for override in jobs[0].overrides if override in shared)


def _cost(plans: Sequence[Plan]) -> list[str]:
    steps, _, memory = plans[0].counts
    return [f"{steps:,}", _range([plan.counts[1] for plan in plans]), gigabytes(memory), duration(plans[0].seconds)]


def makespan(seconds: Sequence[float], concurrency: int) -> float:
    """Return the time until all jobs have ended, if each starts in order as soon as one of the places is free."""
    ends = [0.0] * concurrency
    for each in seconds:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)
