"""Successive halving (Jamieson and Talwalkar, AISTATS 2016) of the jobs of a sweep.

All jobs run until the first rung, a round. The best of them continue until the next rung, and so on; the others are
pruned. Every decision is a function of the results in the run folders, and a rung waits for all of its jobs. Hence the
order in which jobs run does not matter, and a resumed sweep prunes the same jobs.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from fedssl.config.overrides import key_and_group
from fedssl.config.settings import Settings
from fedssl.config.targets import locate
from fedssl.errors import InputError
from fedssl.evaluation.scores import Score
from fedssl.logs import log
from fedssl.runs.run import PRUNED, RANKME, read_run
from simulation.sweep import JobWave, group_jobs, group_settings, write_status
from simulation.sweep_progress import SweepProgress
from simulation.sweep_state import Job, SweepState


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """Successive halving of comparable jobs."""

    metric: str
    reduction_factor: int  # of the jobs at a rung, the best 1 / reduction_factor continue
    rungs: Sequence[int]  # rounds, ascending
    rounds: int  # of a complete job


def pruning_of(state: SweepState, jobs: Sequence[Job]) -> Pruning | None:
    """Return the pruning of a sweep; None if its options have none. Raises `InputError` if they are invalid."""
    metric, reduction_factor = state.options.get("metric"), state.options.get("reduction_factor")
    min_rounds = state.options.get("min_rounds")
    if reduction_factor is None and min_rounds is not None:
        raise InputError(f"sweep.min_rounds={min_rounds} has no effect without pruning; set sweep.reduction_factor=3")
    if metric is None:
        if reduction_factor is None:
            return None
        raise InputError(
            f"sweep.reduction_factor={reduction_factor} needs a result to compare jobs; set e.g. sweep.metric=knn"
        )
    valid = [settings for group in group_jobs(jobs) if (settings := group_settings(group))]  # others fail by themselves
    check_metric(metric, valid, final=reduction_factor is None)
    if reduction_factor is None:
        return None
    rounds, evaluate_every = _common_rounds(valid)
    rungs = make_rungs(min_rounds or evaluate_every, reduction_factor, rounds=rounds, evaluate_every=evaluate_every)
    return Pruning(metric=metric, reduction_factor=reduction_factor, rungs=rungs, rounds=rounds)


def check_metric(metric: str, jobs: Sequence[Settings], *, final: bool) -> None:
    """Raise `InputError` if there are jobs of these settings and none has a result.

    ``final`` is whether it must be a result of the final evaluation, otherwise of those in the rounds.
    """
    import torch  # slow imports

    from server_app.evaluator import CLASSIFIER, Evaluator

    names: dict[str, None] = {}
    for job in jobs:
        if metric != RANKME:
            evaluator = Evaluator(job.evaluation, data=job.data, rounds=1, device=torch.device("cpu"), seed=0)
            units = evaluator.result_units(final=final)
            has_classifier = units and locate(job.model.method.target).uses_labels
            names |= dict.fromkeys([*units, CLASSIFIER] if has_classifier else units)
        names |= dict.fromkeys([RANKME] if job.evaluation.every and job.evaluation.collapse_images else [])
        if metric in names:
            return
    if not jobs:
        return
    if metric == RANKME:
        raise InputError(
            "sweep.metric=rankme is measured in evaluated rounds, and evaluate_every or collapse_images is 0; set "
            "e.g. evaluate_every=5 collapse_images=256"
        )
    listed, group = ", ".join(names) or "none", "final_evaluation" if final else "evaluation"
    raise InputError(
        f"sweep.metric={metric} is not a result of {group}, which gives {listed}; choose one of these, or set {group}"
    )


def make_rungs(min_rounds: int, reduction_factor: int, *, rounds: int, evaluate_every: int) -> list[int]:
    """Return the rounds of the rungs before the last round, ascending: multiples of ``evaluate_every``.

    Raises `InputError` if there is none.
    """
    rungs, budget = list[int](), min_rounds
    while (rung := -(-budget // evaluate_every) * evaluate_every) < rounds:
        rungs.append(rung)
        budget *= reduction_factor
    if not rungs:
        raise InputError(
            f"no job would be pruned: the first rung is not before the last of rounds={rounds}; set a smaller "
            "evaluate_every or sweep.min_rounds, or sweep.reduction_factor=null"
        )
    return list(dict.fromkeys(rungs))


def _common_rounds(jobs: Sequence[Settings]) -> tuple[int, int]:
    """Return ``rounds`` and ``evaluate_every`` of all jobs; raises `InputError` if they differ or the latter is 0."""
    found = {(job.rounds, job.evaluation.every) for job in jobs}
    if len(found) > 1:
        raise InputError(
            "sweep.reduction_factor compares jobs after the same round, but rounds or evaluate_every differ between "
            "them; give all jobs the same, or set sweep.reduction_factor=null"
        )
    rounds, evaluate_every = found.pop() if found else (2, 1)
    if not evaluate_every:
        raise InputError(
            "sweep.reduction_factor compares evaluations in the rounds, and evaluate_every=0; set e.g. evaluate_every=5"
        )
    return rounds, evaluate_every


def successive_halving(
    jobs: Sequence[Job], waiting: Collection[Job], pruning: Pruning, progress: SweepProgress
) -> Iterator[JobWave]:
    """Yield the jobs of each rung; resume the iteration after they have run. Prune the others.

    Jobs that differ only in the seed form a group, which continues or is pruned as a whole, by the mean of its results.
    A group without a result is pruned. Only jobs that are ``waiting`` run. One that fails, or that ``early_stopping``
    finishes, keeps its status.
    """
    groups = group_jobs(jobs)
    alive = list(range(len(groups)))
    spans = [later - earlier for earlier, later in pairwise([0, *pruning.rungs, pruning.rounds])]
    shares = [pruning.reduction_factor**rung for rung in range(len(spans))]
    progress.expect(sum(max(len(waiting) // share, 1) * span for share, span in zip(shares, spans, strict=True)))
    runnable = set(waiting)
    for rung, span in zip(pruning.rungs, spans, strict=False):
        due = [job for group in alive for job in groups[group] if job in runnable and not _has_reached(job, rung)]
        yield JobWave(sorted(due, key=jobs.index), until=rung, work=span)
        runnable -= {job for job in due if read_run(job.folder).state in ("failed", "finished")}
        results = _mean_results({group: groups[group] for group in alive}, pruning.metric, rung)
        order = sorted(results, key=lambda group: (-results[group].goodness, group))
        without = [group for group in alive if group not in results]
        alive = sorted(order[: max(len(order) // pruning.reduction_factor, 1)])
        reasons = {
            group: f"{pruning.metric} {results[group].text} has rank {rank} of {len(order)}, and {len(alive)} continue"
            for rank, group in enumerate(order[len(alive) :], start=len(alive) + 1)
        }
        for group, text in {**reasons, **dict.fromkeys(without, f"it has no finite {pruning.metric}")}.items():
            reason = f"pruned after round {rung}: {text}"
            for job in groups[group]:
                if job in runnable and (group in results or _has_reached(job, rung)):
                    write_status(job, PRUNED, reason=reason)
                    progress.prune(job.folder, reason)
    due = [job for group in alive for job in groups[group] if job in runnable]
    yield JobWave(sorted(due, key=jobs.index), work=spans[-1])


def _has_reached(job: Job, round: int) -> bool:
    run = read_run(job.folder)
    return run.finished or run.rounds_done >= round


def _mean_results(groups: Mapping[int, Sequence[Job]], metric: str, round: int) -> dict[int, Score]:
    """Return the mean result of each group with jobs that have reached the round.

    Seeds differ in difficulty, so means are over those that all groups have, if there are any.
    """
    found = {group: _results(jobs, metric, round) for group, jobs in groups.items()}
    found = {group: by_seed for group, by_seed in found.items() if by_seed}
    common = frozenset.intersection(*map(frozenset, found.values())) if found else frozenset()
    if len(found) > 1 and not common:
        log.warning("after round %d no seed has a result in all groups: their means are over different seeds", round)
    means = dict[int, Score]()
    for group, by_seed in found.items():
        scores = [by_seed[seed] for seed in by_seed if seed in common or not common]
        means[group] = Score(mean(score.value for score in scores), scores[0].unit)
    return means


def _results(jobs: Iterable[Job], metric: str, round: int) -> dict[tuple[str, ...], Score]:
    """Return the finite results of a group by the override of the seed."""
    found = dict[tuple[str, ...], Score]()
    for job in jobs:
        score = read_run(job.folder).score(metric, round=round) if _has_reached(job, round) else None
        if score is not None and math.isfinite(score.value):
            found[tuple(override for override in job.overrides if "seed" in key_and_group(override))] = score
    return found
