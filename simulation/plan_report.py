"""The output of ``fedssl plan=true``: the cost of a run, or of every job of a sweep."""

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedssl.errors import InputError
from fedssl.machine.memory import gigabytes
from fedssl.machine.process import available_cores, process_age
from fedssl.text_table import align
from server_app.console import duration
from simulation.parallel_jobs import JobTask
from simulation.plan import Plan, Planner
from simulation.resources import RAY_OVERHEAD_SECONDS
from simulation.sweep import Job


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
    lines.append(["time", f"{per_round:.2g} s per round, {duration(startup + plan.seconds)} in total"])
    bounds = f"\nupper bounds, because of {', '.join(plan.upper_bounds)}" if plan.upper_bounds else ""
    return align(lines, left=2) + bounds


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


def print_sweep_plan(jobs: Sequence[Job], tasks: Mapping[Path, JobTask] | None, *, limit: int | None) -> int:
    """Print the cost of every job of a sweep, and of all. Return the exit status, which is 2 if a job is rejected.

    ``tasks`` are the jobs that run in parallel, by folder, at most ``limit`` at once; None: one after the other.
    """
    startup, planner = process_age(), Planner()
    plans: dict[Job, Plan] = {}
    rejected = []
    for job in jobs:
        try:
            plans[job] = planner.plan((tasks[job.folder].job if tasks else job).overrides)
        except InputError as error:
            rejected.append(f"{job.name} is rejected: {error}")
    if plans:
        print(align([["job", "settings", "steps", "bytes", "memory", "time"], *_rows(plans, jobs)], left=2))
        used = [tasks[job.folder].cpus for job in plans] if tasks else [available_cores()]
        concurrency = min(max(1, available_cores() // max(used)), len(plans), limit or len(plans))
        slowdown = planner.slowdown(concurrency, max(used)) if concurrency > 1 else 1.0
        total = startup + makespan([slowdown * plan.seconds for plan in plans.values()], concurrency)
        total += RAY_OVERHEAD_SECONDS if tasks else 0.0
        print(f"\n{_number(len(plans), 'job')}, {concurrency} at once, {duration(total)} in total")
    print("".join(f"{line}\n" for line in rejected), end="")
    return 2 if rejected else 0


def _rows(plans: Mapping[Job, Plan], jobs: Sequence[Job]) -> list[list[str]]:
    common = set[str].intersection(*(set(job.overrides) for job in jobs))
    return [
        [
            job.folder.name,
            " ".join(override for override in job.overrides if override not in common),
            f"{sum(counts.steps for counts in plan.rounds):,}",
            f"{sum(counts.bytes for counts in plan.rounds):,}",
            gigabytes(plan.memory),
            duration(plan.seconds),
        ]
        for job, plan in plans.items()
    ]


def makespan(seconds: Sequence[float], concurrency: int) -> float:
    """Return the time until all jobs have ended, if each starts in order as soon as one of the places is free."""
    ends = [0.0] * concurrency
    for each in seconds:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)
