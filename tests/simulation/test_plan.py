"""Seconds and memory of a plan are sums of measured parts. Runs that do not fit are rejected."""

import json
import shutil
from dataclasses import replace

import pytest

from client_app.step_memory import estimate_step_memory
from fedssl.config.load import compose, parse_client_config, with_run_folder
from fedssl.errors import InputError, RequestRefused
from simulation import cli, plan_checks, plan_report
from simulation.cost_measurement import MAX_UPDATES, Measurement, StepSeconds, measure
from simulation.evaluation_cost import EvaluationCost, extrapolate, measure_evaluation
from simulation.parallel_jobs import JobTask
from simulation.plan import Planner, choose_engine, make_plan
from simulation.plan_checks import check_disk, check_memory
from simulation.plan_report import concurrent_jobs, format_plan, makespan
from simulation.resources import RAY_OVERHEAD_SECONDS, EngineChoice
from tests.planning import QUICK, build


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr("simulation.cost_measurement.TRAINING_SECONDS", 0.2)


MEASURED = Measurement(
    client=0.5,
    steps={1: StepSeconds(0.25, 0.0)},
    update=0.125,
    checkpoint=0.0,
    resources=0.0,
    evaluation=EvaluationCost(round=4.0, observation=1.0, final=5.0, baselines=8.0, figures=3.0),
    step_memory=None,
    server_memory=1200,
    worker_memory=300,
    update_memory=7,
    models=1,
    saves_state=False,
    state_bytes=0,
    checkpoint_bytes=100,
)
LOCAL = EngineChoice("local", 1, "")


class TestMakePlan:
    """Three clients of 20 images with batches of 8: 3 steps. A round trains 3 (0.5 + 3 / 4) = 3.75 s."""

    @pytest.fixture
    def overrides(self):
        return [*QUICK, "partition=iid", "batch_size=8", "rounds=2", "evaluate_every=2", "measure_resources=false"]

    def test_one_process(self, overrides, tmp_path):
        """Updates 0.375 s. Round 2 is evaluated: 1 s for each of 4 models and 4 s."""
        components = build(overrides, tmp_path)
        plan = make_plan(components, MEASURED, LOCAL, build=2.0, slowdown=lambda *args: 1.0)
        assert plan.round_seconds == [4.125, 12.125]
        assert plan.seconds == 2 + 4.125 + 12.125 + 16
        assert (plan.memory, plan.worker_memory) == (1200, 0)
        model = sum(array.nbytes for array in components.context.initial_model().layers.values())
        assert plan.disk == 2 * 100 + model  # and the encoder

    def test_an_evaluation_while_the_next_round_runs(self, overrides, tmp_path, monkeypatch):
        """Training and updates 4.125 s, collapse 4 s. The evaluation of the last round is waited for."""
        components = build([*overrides, "evaluate_every=1"], tmp_path)
        monkeypatch.setattr("simulation.plan.can_evaluate_in_background", lambda components, cores: True)
        measured = replace(MEASURED, evaluation=replace(MEASURED.evaluation, round=9.0))
        plan = make_plan(components, measured, LOCAL, build=2.0, slowdown=lambda *args: 1.0)
        assert plan.round_seconds == [8.125, 9 + 9]
        measured = replace(MEASURED, evaluation=replace(MEASURED.evaluation, round=3.0))
        plan = make_plan(components, measured, LOCAL, build=2.0, slowdown=lambda *args: 1.0)
        assert plan.round_seconds == [8.125, 8.125 + 3]

    def test_ray(self, overrides, tmp_path):
        """Two of three clients at once: two turns of 1.25 s, 1.5 times slower."""
        components = build([*overrides, "evaluate_every=0"], tmp_path)
        slowdowns = []

        def slowdown(processes, threads):
            slowdowns.append((processes, threads))
            return 1.5

        plan = make_plan(components, MEASURED, EngineChoice("ray", 2, ""), build=0.0, slowdown=slowdown)
        assert slowdowns == [(2, 1)]
        assert plan.round_seconds == 2 * [2 * 1.25 * 1.5 + 0.375]
        assert plan.seconds == 2 * 4.125 + 16 + RAY_OVERHEAD_SECONDS
        assert plan.memory == 1200 + 2 * 300

    def test_steps_checkpoints_resources_and_states(self, overrides, tmp_path):
        """Three clients with 3 steps and 20 images, in 2 epochs: 18 fixed parts and 120 images."""
        components = build([*overrides, "local_epochs=2", "checkpoint_every=2", "evaluate_every=0"], tmp_path)
        steps, num_bytes = {1: StepSeconds(0.5, 0.125)}, 10
        measured = replace(MEASURED, steps=steps, checkpoint=4.0, resources=2.0, state_bytes=num_bytes)
        plan = make_plan(components, measured, LOCAL, build=1.0, slowdown=lambda *args: 1.0)
        first = 3 * 0.5 + 18 * 0.5 + 120 * 0.125 + 0.375
        assert plan.round_seconds == [first, first + 4]
        assert plan.seconds == 1 + 2 * first + 4 + 2 + 16
        assert plan.memory == 1200 + 5 * num_bytes
        model = sum(array.nbytes for array in components.context.initial_model().layers.values())
        assert plan.disk == 2 * 100 + model + 2 * 5 * num_bytes  # of two rounds

    def test_held_updates_and_models_need_memory_and_every_model_is_evaluated(self, tmp_path):
        overrides = [*QUICK, "dataset.limit=1000", f"num_clients={MAX_UPDATES + 4}", "clients_per_round=24"]
        components = build([*overrides, "partition=iid"], tmp_path / "0")
        plan = make_plan(components, MEASURED, LOCAL, build=0.0, slowdown=lambda *args: 1.0)
        assert plan.memory == 1200 + 4 * 7
        overrides += ["strategy=local_only", "evaluate_every=4", "partition=iid"]
        components = build(overrides, tmp_path / "1")
        model = sum(array.nbytes for array in components.context.initial_model().layers.values())
        plan = make_plan(components, replace(MEASURED, models=20), LOCAL, build=0.0, slowdown=lambda *args: 1.0)
        assert plan.memory == 1200 + 4 * 7 + 2 * 24 * model  # each participant's model and its message
        # The newest model of every client and those of the last 3 rounds, 2 checkpoints, and encoders.
        assert plan.disk == (24 + 3 * 24) * model + 2 * 100 + 24 * model
        assert plan.round_seconds[3] - plan.round_seconds[0] == pytest.approx(24 * 4 + 48 * 1)
        assert plan.seconds == pytest.approx(sum(plan.round_seconds) + 24 * 5 + 8 + 3)

    def test_every_phase_has_its_steps(self, tmp_path):
        components = build([*QUICK, "schedule=progressive", "partition=iid"], tmp_path)
        steps = {phase: StepSeconds(float(phase), 0.0) for phase in range(1, 5)}
        plan = make_plan(components, replace(MEASURED, steps=steps), LOCAL, build=0.0, slowdown=lambda *args: 1.0)
        assert plan.round_seconds == [3 * (0.5 + 0.125) + 3 * phase for phase in (1, 2, 3, 4)]

    def test_what_is_not_exact_is_stated(self, overrides, tmp_path):
        components = build([*overrides, "evaluate_personalized=true", "final_evaluation=knn"], tmp_path)
        measured = replace(MEASURED, evaluation=replace(MEASURED.evaluation, is_extrapolated=True))
        plan = make_plan(components, measured, LOCAL, build=0.0, slowdown=lambda *args: 1.0)
        assert format_plan(plan, startup=0.0).splitlines()[-2:] == [
            "evaluations are extrapolated from some of the images",
            "without evaluate_personalized",
        ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1.0, 2.0], 10.0),  # proportional: a tenth and a fifth of the images
        ([3.0, 4.0], 12.0),  # 2 s and 10 s of images
        ([2.0, 1.0], 1.0),  # a slow start
    ],
)
def test_extrapolated_evaluations_by_hand(seconds, expected):
    assert extrapolate(seconds, (0.1, 0.2)) == pytest.approx(expected)


def test_a_long_evaluation_is_measured_on_a_part(tmp_path, monkeypatch):
    overrides = ["dataset.limit=500", "evaluate_every=1", "evaluation=knn", "final_evaluation=knn"]
    components = build([*QUICK, *overrides], tmp_path)
    monkeypatch.setattr("simulation.evaluation_cost.PART", 100)
    complete = measure_evaluation(components, training=1000.0)
    assert not complete.is_extrapolated
    monkeypatch.setattr("simulation.evaluation_cost.MIN_SECONDS", 0.0)
    part = measure_evaluation(components, training=0.0)
    assert part.is_extrapolated
    assert min(part.round, part.final, part.baselines) > 0


def test_the_report_by_hand(tmp_path):
    components = build([*QUICK, "partition=iid", "batch_size=8", "rounds=2", "measure_resources=false"], tmp_path)
    plan = make_plan(components, MEASURED, EngineChoice("ray", 2, ""), build=1.0, slowdown=lambda *args: 1.0)
    down, up = (sum(getattr(counts, name) for counts in plan.rounds) for name in ("bytes_down", "bytes_up"))
    model = sum(array.nbytes for array in components.context.initial_model().layers.values())
    assert format_plan(replace(plan, upper_bounds=["early_stopping"]), startup=2.0).splitlines() == [
        "engine    ray, 2 clients at once",
        "rounds    2, each with 3 of 5 clients",
        "steps     9 per round, 18 in total",
        f"download  {down / 6:,.0f} bytes per client and round, {down:,} in total",
        f"upload    {up / 6:,.0f} bytes per client and round, {up:,} in total",
        "memory    0.0 MB: server 0.0 MB, 2 workers with 0.0 MB each",
        f"disk      {(200 + model) / 1e6:.1f} MB of checkpoints, updates, client states, snapshots and encoders",
        "time      2.9 s per round, 33 s in total",  # 2 + 1 + 2 * (2 * 1.25 + 0.375) + 16 + 8
        "upper bounds, because of early_stopping",
    ]
    assert "18 min per round," in format_plan(replace(plan, round_seconds=[1000.0, 1200.0]), startup=2.0)


@pytest.mark.parametrize(
    ("seconds", "concurrency", "expected"),
    [([3, 1, 2], 1, 6), ([3, 1, 2], 2, 3), ([1, 1, 4], 2, 5), ([5], 3, 5)],
)
def test_the_time_of_concurrent_jobs_by_hand(seconds, concurrency, expected):
    assert makespan(seconds, concurrency) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        pytest.param(["strategy=krum", "clients_per_round=5"], marks=pytest.mark.heavy),
        pytest.param(["strategy=gossip"], marks=pytest.mark.heavy),
    ],
)
def test_measurement_of_a_run(tmp_path, overrides):
    """All parts are measured, nothing is written, and the run itself is unchanged."""
    components = build([*QUICK, "evaluate_every=1", "collapse_images=16", "final_evaluation=knn", *overrides], tmp_path)
    measured = measure(components, separate_workers=True)
    assert measured.steps[1].total(steps=1, images=16) > 0
    for name in ("update", "checkpoint", "resources", "step_memory", "checkpoint_bytes"):
        assert getattr(measured, name) > 0, name
    for name in ("round", "observation", "final", "baselines", "figures"):
        assert getattr(measured.evaluation, name) > 0, name
    assert measured.worker_memory > 0
    assert measured.server_memory > 0
    assert (measured.saves_state, measured.state_bytes) == (False, 0)
    assert not list(tmp_path.iterdir())


def test_many_steps_on_few_images_do_not_diverge_and_base_layers_are_not_kept(tmp_path):
    """VICReg on 4 images, with LoRA, whose base layers a client stores."""
    small = [
        "method=vicreg",
        "batch_size=4",
        "tuning=lora",
        "tuning.rank=2",
        "optimizer.lr=10",
        "measure_resources=false",
    ]
    measured = measure(build([*QUICK, *small], tmp_path), separate_workers=False)
    assert measured.steps[1].total(steps=1, images=4) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_cached_layers_are_no_state(tmp_path):
    """Clients cache frozen stages, but have no state whose round they report."""
    components = build([*QUICK, "schedule=layer_wise", "measure_resources=false"], tmp_path)
    measured = measure(components, separate_workers=False)
    assert not measured.saves_state
    assert measured.state_bytes > 0
    assert list(measured.steps) == [1, 2, 3, 4]
    assert measured.worker_memory == 0
    components = build([*QUICK, "method=byol", "calibration=auxiliary", "calibration.when=start"], tmp_path)
    assert measure(components, separate_workers=False).saves_state


class TestRejected:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["engine=deployment"], "plan=true cannot estimate engine=deployment, .*; set engine=auto"),
            (["engine=ray", "engine.address=auto"], "on this machine; leave out engine.address"),
            (["secure_aggregation=secagg_plus"], "cannot estimate the messages of secure_aggregation; set"),
            (["pause_after=2"], "plan=true estimates a complete run; leave out pause_after"),
            (["device=cpu", "cuda_graphs=true", "optimizer.fused=true"], "cuda_graphs=true needs device=cuda"),
            (["engine=ray", "engine.client_cpus=9999"], "engine.client_cpus=9999 must be a whole number from 1 to"),
            (["clients_per_round=9"], "clients_per_round=9 is more than num_clients=5"),
        ],
    )
    def test_runs_without_an_estimate(self, overrides, message):
        with pytest.raises(InputError, match=message):
            Planner().plan([*QUICK, *overrides])

    def test_a_step_that_does_not_fit_names_a_batch_that_does(self, tmp_path, monkeypatch):
        overrides = [*QUICK, "partition=iid", "dataset.limit=1000", "batch_size=200"]
        step = estimate_step_memory(parse_client_config(with_run_folder(compose(overrides), tmp_path).client_yaml))
        monkeypatch.setattr(plan_checks, "available_memory", lambda **kwargs: step.of_batch(130))
        with pytest.raises(InputError, match="a training step with 200 images needs about .* MB of memory") as caught:
            Planner().plan(overrides)
        assert str(caught.value).endswith("; batch_size=128 fits")
        monkeypatch.setattr("simulation.plan.check_memory", lambda plan, components: None)
        assert Planner().plan([*overrides, "batch_size=128"]).seconds > 0

    def test_an_encoder_without_an_estimate_of_its_memory_is_measured(self, monkeypatch):
        def refuse(settings):
            raise RequestRefused("the memory of Mine cannot be estimated (TypeError)")

        monkeypatch.setattr(plan_checks, "estimate_step_memory", refuse)
        assert Planner().plan(QUICK).memory > 0

    def test_a_run_on_ray_that_does_not_fit_names_fewer_workers(self, tmp_path, monkeypatch):
        """A server of 1200 bytes and three workers of 300."""
        components = build([*QUICK, "measure_resources=false"], tmp_path)
        plan = make_plan(components, MEASURED, EngineChoice("ray", 3, ""), build=0.0, slowdown=lambda *args: 1.0)
        monkeypatch.setattr(plan_checks, "available_cores", lambda: 4)
        for available, remedy in [
            (1900, "engine.client_cpus=2 runs 2 clients at once, which fit"),
            (1300, "engine=local fits"),
        ]:
            monkeypatch.setattr(plan_checks, "available_memory", lambda available=available, **kwargs: available)
            with pytest.raises(InputError, match=remedy):
                check_memory(plan, components)
        monkeypatch.setattr(plan_checks, "available_memory", lambda **kwargs: 2100)
        check_memory(plan, components)

    def test_a_process_that_does_not_fit_names_a_batch_that_does(self, tmp_path, monkeypatch):
        components = build([*QUICK, "partition=iid", "dataset.limit=1000", "batch_size=200"], tmp_path)
        step = estimate_step_memory(parse_client_config(components.settings.client_yaml))
        measured = replace(MEASURED, server_memory=1000 + step.of_batch(200))
        plan = make_plan(components, measured, LOCAL, build=0.0, slowdown=lambda *args: 1.0)
        for images, remedy in [(130, "batch_size=128 fits"), (0, "choose a smaller encoder, or lower clients_per")]:
            available = 1000 + step.of_batch(images)
            monkeypatch.setattr(plan_checks, "available_memory", lambda available=available, **kwargs: available)
            with pytest.raises(InputError, match=f"the run needs .* of memory, and .* are available; {remedy}"):
                check_memory(plan, components)

    def test_files_that_do_not_fit(self, tmp_path, monkeypatch):
        """Two checkpoints, and snapshots of three clients and a model after each of four rounds."""
        components = build([*QUICK, "snapshot_every=1"], tmp_path / "run")
        model = sum(array.nbytes for array in components.context.initial_model().layers.values())
        plan = make_plan(components, MEASURED, LOCAL, build=0.0, slowdown=lambda *args: 1.0)
        assert plan.disk == 2 * 100 + model + 4 * 4 * model
        free = shutil.disk_usage(tmp_path)._replace(free=plan.disk)
        monkeypatch.setattr(shutil, "disk_usage", {tmp_path: free}.__getitem__)
        check_disk(plan, components.settings)
        monkeypatch.setattr(shutil, "disk_usage", {tmp_path: free._replace(free=plan.disk - 1)}.__getitem__)
        with pytest.raises(InputError, match=f"are free in {tmp_path}; raise snapshot_every, or set output_dir to"):
            check_disk(plan, components.settings)

    def test_plan_is_an_option_of_the_command_only(self):
        with pytest.raises(InputError, match="plan=true is for the command fedssl, which then runs nothing"):
            compose(["plan=true"])


def command(monkeypatch, *overrides):
    monkeypatch.setattr("sys.argv", ["fedssl", *overrides])
    return cli._run_all()


class TestCommand:
    def test_a_run(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert command(monkeypatch, *QUICK, "plan=true") == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == [
            *("engine", "rounds", "steps", "download", "upload", "memory"),
            *(lines[6].split()[0], "disk", "time"),
        ]
        assert not list(tmp_path.iterdir())

    def test_a_sweep(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        status = command(monkeypatch, "-m", *QUICK, "plan=true", "seed=0,1", "clients_per_round=2,9", "sweep.jobs=1")
        output = capsys.readouterr().out
        assert status == 2
        assert output.count("is rejected: clients_per_round=9 is more than num_clients=5") == 2
        assert "clients_per_round=2 seed=0" in output
        assert "2 jobs, 1 at once" in output
        assert not list(tmp_path.iterdir())

    def test_jobs_with_the_same_cost_share_a_measurement_and_a_row(self, tmp_path, monkeypatch, capsys):
        """Learning rates cost nothing, and equal numbers of images neither: seeds change only who has which image."""
        monkeypatch.chdir(tmp_path)
        measured = []

        def measure(components, **kwargs):
            measured.append(components.settings.training.batch_size)
            return MEASURED

        monkeypatch.setattr("simulation.plan.measure", measure)
        swept = ["optimizer.lr=0.1,0.2,0.4", "seed=0,1", "batch_size=8,16", "partition=iid", "clients_per_round=5"]
        assert command(monkeypatch, "-m", *QUICK, "plan=true", *swept, "sweep.jobs=1") == 0
        header, *rows, _, total = capsys.readouterr().out.splitlines()
        assert header.split() == ["jobs", "settings", "steps", "bytes", "memory", "time"]
        assert measured == [8, 16]
        assert [row.partition("  ")[0] for row in rows] == ["0, 2, 4, 6 and 2 more", "1, 3, 5, 7 and 2 more"]
        assert [row.partition("  ")[2].split()[0] for row in rows] == ["batch_size=8", "batch_size=16"]
        assert total.startswith("12 jobs, 1 at once, ")

    def test_the_bytes_of_a_job_are_those_of_its_run(self, tmp_path, monkeypatch, capsys):
        """Clients receive the path of the run folder, that of the job."""
        monkeypatch.setattr("simulation.plan.measure", lambda components, **kwargs: MEASURED)
        folder = tmp_path / "a-sweep"
        command(monkeypatch, "-m", *QUICK, "plan=true", "seed=0,1", f"hydra.sweep.dir={folder}", "sweep.jobs=1")
        row = capsys.readouterr().out.splitlines()[1]
        assert not folder.exists()
        cli.run([*QUICK, "seed=0", f"output_dir={folder / '0'}"])
        lines = [json.loads(line) for line in (folder / "0" / "metrics.jsonl").read_text().splitlines()]
        assert f" {sum(line['bytes_up'] + line['bytes_down'] for line in lines):,} " in row

    @pytest.mark.heavy
    def test_a_pruned_sweep_is_an_upper_bound(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("simulation.plan.measure", lambda components, **kwargs: MEASURED)
        options = ["sweep.metric=knn", "sweep.reduction_factor=2", "evaluate_every=2", "evaluation=knn"]
        command(monkeypatch, "-m", *QUICK, "plan=true", "seed=0,1", *options)
        assert "upper bounds, because of sweep.reduction_factor" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("cores", "memory", "limit", "expected"),
        [(8, None, None, 3), (8, 10e9, None, 2), (5, None, None, 2), (9, None, 1, 1)],
    )
    def test_concurrent_jobs_need_cores_and_memory(self, monkeypatch, cores, memory, limit, expected):
        """Three jobs with two cores and 3 GB each; Ray has 70% of 10 GB."""
        monkeypatch.setattr(plan_report, "available_cores", lambda: cores)
        monkeypatch.setattr(plan_report, "available_memory", lambda: memory)
        tasks = [JobTask(None, 2, 0, 3 * 10**9)] * 3
        assert concurrent_jobs(tasks, limit=limit) == expected

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["plan=3"], "plan=3 must be plan=true or plan=false"),
            (["-m", "plan=true,false"], "must be plan=true or plan=false"),
            (["plan=true", "--info"], "cannot estimate what Hydra's sweepers, launchers and flags run"),
            (["-m", "plan=true", "hydra/launcher=joblib"], "cannot estimate what Hydra's sweepers"),
            (["-m", "plan=true", "resume=x", "seed=0,1"], "plan=true estimates a new sweep; leave out resume"),
            (["-m", "plan=true", "seed=0,1", "sweep.address=auto"], "on this machine; leave out sweep.address"),
            (["plan=true", "seed=0,1"], "seed=0,1 sweeps over values; add -m"),
        ],
    )
    def test_bad_input(self, monkeypatch, overrides, message):
        with pytest.raises(InputError, match=message):
            command(monkeypatch, *overrides)


def test_engine_of_a_plan(monkeypatch):
    monkeypatch.setattr("simulation.plan.available_cores", lambda: 8)
    settings = compose([*QUICK, "engine=ray", "threads=2", "clients_per_round=5"])
    assert choose_engine(settings).concurrency == 4
    assert choose_engine(compose([*QUICK, "engine=ray", "engine.client_cpus=8"])).concurrency == 1
    assert choose_engine(compose([*QUICK, "engine=local"])) == EngineChoice("local", 1, "")
    # The memory of the measurement must not change the choice.
    monkeypatch.setattr("simulation.plan.auto_engine", lambda settings: EngineChoice("ray", 2, "reason"))
    assert choose_engine(compose([*QUICK, "engine=auto"])) == EngineChoice("ray", 2, "reason")
