"""Successive halving: its rungs, what it prunes, and real sweeps, also after an interruption."""

import json
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedssl.config.overrides import check_sweep
from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY, ERROR
from fedssl.runs.run import read_run
from simulation import cli
from simulation.pruning import Pruning, make_rungs, pruning_of, successive_halving
from simulation.sweep import group_jobs
from simulation.sweep_progress import SweepProgress
from simulation.sweep_state import Job, plan_jobs
from tests.runs import write_run

QUICK = ["num_clients=2", "rounds=4", "local_epochs=1", "dataset.limit=60", "dataset.test_limit=30", "encoder.width=2"]
QUICK += ["threads=1", "partition=iid", "evaluate_every=1", "final_evaluation=knn", "collapse_images=0"]
QUICK += ["measure_resources=false", "augmentation=none"]
PRUNED = ["sweep.metric=knn", "sweep.reduction_factor=2", "sweep.jobs=1"]


@pytest.mark.parametrize(
    ("min_rounds", "factor", "rounds", "every", "expected"),
    [
        (5, 3, 20, 5, [5, 15]),  # 5, 15, and 45 is after the last round
        (1, 2, 10, 1, [1, 2, 4, 8]),
        (1, 2, 10, 3, [3, 6, 9]),  # 1, 2, 4, 8 rounded up to 3, 3, 6, 9
        (1, 4, 4, 1, [1]),  # 4 is the last round
        (7, 2, 20, 5, [10, 15]),  # 7 and 14, rounded up
    ],
)
def test_rungs_by_hand(min_rounds, factor, rounds, every, expected):
    assert make_rungs(min_rounds, factor, rounds=rounds, evaluate_every=every) == expected


@pytest.mark.parametrize(("min_rounds", "every"), [(4, 1), (1, 4), (9, 1)])
def test_no_rung_before_the_last_round_is_an_error(min_rounds, every):
    with pytest.raises(InputError, match="no job would be pruned: the first rung is not before the last of rounds=4"):
        make_rungs(min_rounds, 2, rounds=4, evaluate_every=every)


def make_jobs(folder, number, seeds=(0,)):
    pairs = [(lr, index, seed) for lr in range(number) for index, seed in enumerate(seeds)]
    return [Job(folder / f"{lr * len(seeds) + i}", (f"optimizer.lr={lr}", f"seed={seed}")) for lr, i, seed in pairs]


def train(job, until, *, result, rounds, unit=ACCURACY):
    """Write the files of a run until a round; ``result`` maps job and round to the result, None if there is none."""
    job.folder.mkdir(exist_ok=True)
    last = until or rounds
    lines = []
    for round in range(1, last + 1):
        value = result(job, round)
        evaluation = {} if value is None else {"evaluation": {"knn": value}, "units": {"knn": unit}}
        lines.append(json.dumps({"round": round, **evaluation}))
    (job.folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    summary = {"status": "paused" if until else "finished", "reason": None, "overrides": [*job.overrides]}
    summary |= {"rounds": last, "final": {"federated": {"knn": result(job, last)}}}
    (job.folder / "summary.json").write_text(json.dumps(summary))


def halve(jobs, pruning, *, result, waiting=None, order=list, stop=None, unit=ACCURACY):
    """Run all batches; return the rounds that each job trained, in order of the calls."""
    trained, numbers = {job.folder.name: [] for job in jobs}, count()
    waiting = jobs if waiting is None else waiting
    for batch in successive_halving(jobs, waiting, pruning, SweepProgress([job.folder for job in waiting])):
        for job in order(batch.jobs):
            if next(numbers) == stop:
                return trained
            train(job, batch.until, result=result, rounds=pruning.rounds, unit=unit)
            trained[job.folder.name].append(batch.until or pruning.rounds)
    return trained


def statuses(jobs):
    return {job.folder.name: read_run(job.folder).state for job in jobs}


class TestSuccessiveHalving:
    def test_by_hand(self, tmp_path):
        """Nine jobs, factor 3: three reach round 3, one reaches the end, as the result is the number of the job."""
        jobs = make_jobs(tmp_path, 9)
        pruning = Pruning(metric="knn", reduction_factor=3, rungs=[1, 3], rounds=5)
        trained = halve(jobs, pruning, result=lambda job, round: int(job.folder.name))
        expected = {**{str(job): [1] for job in range(6)}, "6": [1, 3], "7": [1, 3], "8": [1, 3, 5]}
        assert trained == expected
        assert statuses(jobs) == {**{str(job): "pruned" for job in range(8)}, "8": "finished"}
        assert read_run(jobs[5].folder).failure_reason == (
            "pruned after round 1: knn 500.0% has rank 4 of 9, and 3 continue"
        )
        assert read_run(jobs[6].folder).failure_reason == (
            "pruned after round 3: knn 600.0% has rank 3 of 3, and 1 continue"
        )

    def test_of_an_error_less_is_better(self, tmp_path):
        jobs = make_jobs(tmp_path, 3)
        pruning = Pruning(metric="knn", reduction_factor=3, rungs=[1], rounds=2)
        halve(jobs, pruning, result=lambda job, round: int(job.folder.name), unit=ERROR)
        assert statuses(jobs) == {"0": "finished", "1": "pruned", "2": "pruned"}

    def test_seeds_continue_together_by_their_mean(self, tmp_path):
        """Means of the seeds 0 and 10: 0.5, 0.6, 0.3. The best single job, 0.9, has the mean 0.5."""
        values = {"0": 0.9, "1": 0.1, "2": 0.6, "3": 0.6, "4": 0.3, "5": 0.3}
        jobs = make_jobs(tmp_path, 3, seeds=(0, 10))
        names = [[job.folder.name for job in group] for group in group_jobs(jobs)]
        assert names == [["0", "1"], ["2", "3"], ["4", "5"]]
        pruning = Pruning(metric="knn", reduction_factor=3, rungs=[1], rounds=2)
        halve(jobs, pruning, result=lambda job, round: values[job.folder.name])
        finished = {name for name, status in statuses(jobs).items() if status == "finished"}
        assert finished == {"2", "3"}

    @pytest.mark.parametrize(("groups", "seeds"), [(4, (0,)), (2, (0, 10))])
    def test_a_job_without_a_result_is_not_compared(self, tmp_path, groups, seeds):
        """The failed job 3 would be the best. It does not run again, also if the other seed of its group continues."""
        jobs = make_jobs(tmp_path, groups, seeds=seeds)
        pruning = Pruning(metric="knn", reduction_factor=2, rungs=[1, 2], rounds=3)
        started = []
        for batch in successive_halving(jobs, jobs, pruning, SweepProgress([])):
            for job in batch.jobs:
                started.append(job.folder.name)
                if job.folder.name == "3":
                    write_run(job.folder, [], status="failed")
                else:
                    train(job, batch.until, result=lambda job, round: int(job.folder.name), rounds=3)
        assert started.count("3") == 1
        assert statuses(jobs) == {"0": "pruned", "1": "pruned", "2": "finished", "3": "failed"}

    def test_a_failed_seed_does_not_favor_its_group(self, tmp_path):
        """Group 0 has 0.5 and 0.9, group 1 has 0.6 of the first seed: better there, although its mean is lower."""
        values = {"0": 0.5, "1": 0.9, "2": 0.6}
        jobs = make_jobs(tmp_path, 2, seeds=(0, 10))
        pruning = Pruning(metric="knn", reduction_factor=2, rungs=[1], rounds=2)
        write_run(jobs[3].folder, [], status="failed")
        halve(jobs, pruning, result=lambda job, round: values[job.folder.name], waiting=jobs[:3])
        assert statuses(jobs) == {"0": "pruned", "1": "pruned", "2": "finished", "3": "failed"}
        reason = read_run(jobs[0].folder).failure_reason
        assert reason == "pruned after round 1: knn 50.0% has rank 2 of 2, and 1 continue"

    def test_means_over_different_seeds_are_a_warning(self, tmp_path, caplog):
        jobs = make_jobs(tmp_path, 2, seeds=(0, 10))
        pruning = Pruning(metric="knn", reduction_factor=2, rungs=[1], rounds=2)
        for job in (jobs[0], jobs[3]):
            write_run(job.folder, [], status="failed")
        halve(jobs, pruning, result=lambda job, round: 0.5, waiting=jobs[1:3])
        assert "after round 1 no seed has a result in all groups: their means are over different seeds" in caplog.text

    @pytest.mark.parametrize("without", [{"1", "3"}, {"0", "1", "2", "3", "4", "5"}])
    def test_groups_without_a_finite_result_are_pruned(self, tmp_path, without):
        """Job 3 fails. Job 5 does not reach the rung, so that a resumed sweep runs it again."""
        jobs = make_jobs(tmp_path, 6)
        pruning = Pruning(metric="knn", reduction_factor=2, rungs=[2], rounds=3)
        write_run(jobs[3].folder, [], status="failed")

        def result(job, round):  # of a method or protocol without the metric
            return None if job.folder.name in without else int(job.folder.name)

        for _ in range(2):
            waiting = [job for job in jobs if read_run(job.folder).state not in ("finished", "failed")]
            for batch in successive_halving(jobs, waiting, pruning, SweepProgress([])):
                for job in batch.jobs:
                    train(job, 1 if job.folder.name == "5" else batch.until, result=result, rounds=3)
            expected = dict.fromkeys("0124", "pruned") | {"3": "failed", "5": "paused"}
            assert statuses(jobs) == expected | ({} if "4" in without else {"4": "finished"})
            assert read_run(jobs[1].folder).failure_reason == "pruned after round 2: it has no finite knn"

    def test_jobs_that_have_ended_keep_their_status(self, tmp_path):
        """Seeds of three groups: early stopping finishes jobs 0 and 5 in round 1, and job 3 fails."""
        jobs, started = make_jobs(tmp_path, 3, seeds=(0, 10)), []
        pruning = Pruning(metric="knn", reduction_factor=3, rungs=[2], rounds=3)
        for batch in successive_halving(jobs, jobs, pruning, SweepProgress([])):
            for job in batch.jobs:
                started.append(job.folder.name)
                if job.folder.name == "3":
                    write_run(job.folder, [], status="failed")
                else:
                    early = job.folder.name in ("0", "5")
                    until, rounds = (None, 1) if early else (batch.until, 3)
                    train(job, until, result=lambda job, round: int(job.folder.name), rounds=rounds)
        assert started == ["0", "1", "2", "3", "4", "5", "4"]
        expected = {"0": "finished", "1": "pruned", "2": "pruned", "3": "failed", "4": "finished", "5": "finished"}
        assert statuses(jobs) == expected

    @settings(max_examples=15)
    @given(data=st.data())
    def test_order_and_interruptions_change_nothing(self, tmp_path_factory, data):
        """Against a transcription of the algorithm that sorts lists of results."""
        number = data.draw(st.integers(1, 9))
        values = data.draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
        factor = data.draw(st.integers(2, 4))
        stop = data.draw(st.integers(0, 2 * number))
        pruning = Pruning(metric="knn", reduction_factor=factor, rungs=[2, 4], rounds=5)
        folder = tmp_path_factory.mktemp("sweep")
        jobs = make_jobs(folder, number)

        def result(job, round):
            return values[int(job.folder.name)]

        halve(jobs, pruning, result=result, stop=stop)
        waiting = [job for job in jobs if not read_run(job.folder).finished]
        halve(jobs, pruning, result=result, waiting=waiting, order=lambda batch: reversed(list(batch)))
        alive = list(range(number))
        for _ in pruning.rungs:
            alive = sorted(alive, key=lambda job: (-values[job], job))[: max(len(alive) // factor, 1)]
        finished = {int(name) for name, status in statuses(jobs).items() if status == "finished"}
        assert finished == set(alive)


class TestBadInput:
    @pytest.mark.parametrize(
        ("overrides", "options", "message"),
        [
            ([], {"reduction_factor": 2}, "sweep.reduction_factor=2 needs a result to compare jobs; set e.g. sweep.me"),
            ([], {"min_rounds": 2}, "sweep.min_rounds=2 has no effect without pruning; set sweep.reduction_factor=3"),
            ([], {"metric": "knn", "reduction_factor": 2, "min_rounds": 4}, "no job would be pruned"),
            (
                [],
                {"metric": "linear", "reduction_factor": 2},
                "linear is not a result of evaluation, which gives knn; choose one of these",
            ),
            (
                ["final_evaluation=linear"],
                {"metric": "knn"},
                "knn is not a result of final_evaluation, which gives linear",
            ),
            ([], {"metric": "rankme", "reduction_factor": 2}, "evaluate_every or collapse_images is 0; set e.g."),
            (["evaluate_every=0"], {"metric": "knn", "reduction_factor": 2}, "and evaluate_every=0; set e.g. eval"),
            (["rounds=4,5"], {"metric": "knn", "reduction_factor": 2}, "rounds or evaluate_every differ between them"),
        ],
    )
    def test_one_sentence(self, tmp_path, overrides, options, message):
        state = plan_jobs(tmp_path, [*QUICK, "seed=0,1", *overrides], options)
        with pytest.raises(InputError, match=message):
            pruning_of(state, state.jobs_in(tmp_path))

    def test_a_continued_sweep_keeps_no_rounds_of_the_rungs(self, tmp_path):
        options = {"metric": "knn", "reduction_factor": 2, "min_rounds": 1}
        state = plan_jobs(tmp_path, [*QUICK, "evaluate_every=1", "seed=0,1"], options)
        assert pruning_of(state, state.jobs_in(tmp_path)).rungs
        state.save(tmp_path)
        continued = plan_jobs(tmp_path, [], {"reduction_factor": None})
        assert pruning_of(continued, continued.jobs_in(tmp_path)) is None
        wrong = plan_jobs(tmp_path, [], {"reduction_factor": None, "min_rounds": 2})
        with pytest.raises(InputError, match="sweep.min_rounds=2 has no effect without pruning"):
            pruning_of(wrong, wrong.jobs_in(tmp_path))

    def test_a_rejected_sweep_leaves_no_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for option, message in [
            ("sweep.reduction_factor=1", "sweep.reduction_factor=1 must be an integer of at least 2"),
            ("sweep.min_rounds=2", "has no effect without pruning"),
        ]:
            with pytest.raises(InputError, match=message):
                cli._run_sweep([*QUICK, "seed=0,1", option])
            with pytest.raises(InputError, match=message):
                cli._run_sweep([*QUICK, "seed=0,1", option, "hydra.sweep.dir=sweep"])
        assert tmp_path.is_dir()
        assert not list(tmp_path.iterdir())

    def test_a_pause_is_for_a_single_run(self):
        with pytest.raises(InputError, match="pause_after=1 is for a single run; set sweep.reduction_factor to prune"):
            check_sweep(["seed=0,1", "pause_after=1"])


def table(folder):
    return (folder / "results.csv").read_text()


@pytest.mark.heavy
def test_a_sweep_prunes_and_can_be_continued_without_pruning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    jobs = [*QUICK, "optimizer.lr=0,0.1,1", "hydra.sweep.dir=sweep"]
    assert cli._run_sweep([*jobs, *PRUNED]) == 0
    found = statuses([Job(tmp_path / "sweep" / str(number), ()) for number in range(3)])
    assert sorted(found.values()) == ["finished", "pruned", "pruned"]
    assert "pruned:" in capsys.readouterr().out
    pruned = table(tmp_path / "sweep")
    assert cli._run_sweep(["resume=sweep", "sweep.jobs=1"]) == 0  # the options are saved
    assert table(tmp_path / "sweep") == pruned
    assert cli._run_sweep(["resume=sweep", "sweep.jobs=1", "sweep.reduction_factor=null"]) == 0
    continued = table(tmp_path / "sweep")
    assert cli._run_sweep([*jobs[:-1], "hydra.sweep.dir=whole", "sweep.jobs=1"]) == 0
    assert continued == table(tmp_path / "whole")  # and a paused job that is resumed has the same bits
    for number in range(3):
        first, second = (tmp_path / name / str(number) / "encoder.pt" for name in ("sweep", "whole"))
        assert first.read_bytes() == second.read_bytes()
