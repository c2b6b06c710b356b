"""The jobs of a sweep, and its file: what makes a job another one, and what a file must not select."""

import pytest
import yaml

from fedssl.config.literal import literal_values
from fedssl.errors import InputError
from simulation.sweep_state import STATE_FILE, Job, split_options
from simulation.sweep_state import plan_jobs as plan_state


def plan_jobs(folder, overrides, **options):
    folder.mkdir(exist_ok=True)
    state = plan_state(folder, overrides, options)
    state.save(folder)
    return state.jobs_in(folder)


def names_and_overrides(jobs):
    return {job.folder.name: list(job.overrides) for job in jobs}


class TestJobs:
    def test_every_combination_in_hydras_order(self, tmp_path):
        jobs = plan_jobs(tmp_path, ["rounds=3", "seed=0,1", "partition.alpha=0.1,1"])
        assert names_and_overrides(jobs) == {
            "0": ["rounds=3", "seed=0", "partition.alpha=0.1"],
            "1": ["rounds=3", "seed=0", "partition.alpha=1"],
            "2": ["rounds=3", "seed=1", "partition.alpha=0.1"],
            "3": ["rounds=3", "seed=1", "partition.alpha=1"],
        }

    @pytest.mark.parametrize(
        ("override", "values"),
        [
            ("seed=range(0,3)", ["seed=0", "seed=1", "seed=2"]),
            ("strategy=glob(fed*,exclude=[fedbn,feddyn,fede*,fedn*,fedu])", ["strategy=fedavg", "strategy=fedprox"]),
            ("+final_evaluation.x=choice(a,b)", ["+final_evaluation.x=a", "+final_evaluation.x=b"]),
        ],
    )
    def test_ranges_patterns_and_choices(self, tmp_path, override, values):
        assert [list(job.overrides) for job in plan_jobs(tmp_path, [override])] == [[value] for value in values]

    def test_a_resumed_sweep_keeps_its_jobs_and_appends_new_ones(self, tmp_path):
        plan_jobs(tmp_path, ["rounds=3", "seed=0,1"])
        jobs = plan_jobs(tmp_path, ["seed=1,2"])
        found = names_and_overrides(jobs)
        assert found == {str(seed): ["rounds=3", f"seed={seed}"] for seed in range(3)}

    @pytest.mark.parametrize(
        "content",
        [
            "jobs: [1]",
            "overrides: 3\njobs: {}",
            "jobs: {}",
            "[]",
            "overrides: []\njobs: {'0': [rounds=3], '1': [rounds=3]}",
            "overrides: []\njobs: {'../evil': [rounds=3]}",
            "overrides: []\njobs: {'1': [rounds=3]}",
            "overrides: []\njobs: {'0': [output_dir=/home]}",
            "overrides: []\njobs: {'0': [strategy._target_=os.system]}",
            "overrides: ['+x=${oc.env:HOME}']\njobs: {}",
            "overrides: ['hydra.searchpath=[file:///tmp/evil]']\njobs: {}",
        ],
    )
    def test_a_damaged_or_foreign_file_is_one_sentence(self, tmp_path, content):
        (tmp_path / STATE_FILE).write_text(content)
        with pytest.raises(InputError, match=STATE_FILE) as caught:
            plan_jobs(tmp_path, ["seed=0,1"])
        assert "\n" not in str(caught.value)
        assert (tmp_path / STATE_FILE).read_text() == content

    def test_an_edited_file_is_refused(self, tmp_path):
        """The job would be finished, with the results of other settings."""
        plan_jobs(tmp_path, ["seed=0,1"])
        file = tmp_path / STATE_FILE
        file.write_text(file.read_text().replace("seed=1", "seed=2"))
        with pytest.raises(InputError, match=r"sweep\.yaml cannot be used \(its checksum is wrong: it was edited"):
            plan_jobs(tmp_path, [])

    def test_engine_and_threads_make_no_new_jobs_but_rounds_do(self, tmp_path):
        plan_jobs(tmp_path, ["rounds=3", "seed=0,1", "engine=ray", "engine.client_cpus=2"])
        jobs = plan_jobs(tmp_path, ["threads=1", "engine=local", "evaluate_every=7"])
        assert names_and_overrides(jobs) == {
            str(seed): ["rounds=3", f"seed={seed}", "threads=1", "engine=local", "evaluate_every=7"] for seed in (0, 1)
        }
        assert len(plan_jobs(tmp_path, ["rounds=4"])) == 4
        assert len(plan_jobs(tmp_path, ["threads=1,2"])) == 4 + 2  # those with rounds=4 have threads=1

    @pytest.mark.parametrize(
        ("overrides", "axis", "differing"),
        [
            (["engine=ray", "engine.client_gpus=0.25,0.5"], [], {"engine.client_gpus=0.25", "engine.client_gpus=0.5"}),
            (["tracker=mlflow", "tracker.experiment=1,2"], [], {"tracker.experiment='1'", "tracker.experiment='2'"}),
            (["threads=1"], ["threads=2"], {"threads=1", "threads=2"}),
            ([], ["aggregation.max_retries=3"], {"aggregation.max_retries=3"}),
        ],
    )
    def test_jobs_that_differ_in_engine_or_threads_alone(self, tmp_path, overrides, axis, differing):
        first, second = plan_jobs(tmp_path, literal_values(overrides, sweep=True), axes={"x": axis})
        assert {*first.overrides} ^ {*second.overrides} == differing
        resumed = plan_jobs(tmp_path, ["keep_checkpoints=1"])
        assert resumed == [Job(job.folder, (*job.overrides, "keep_checkpoints=1")) for job in (first, second)]

    @pytest.mark.parametrize(
        "setting", ["early_stopping.patience=3", "aggregation.round_deadline=5", "statistics.max_clients=2"]
    )
    def test_settings_that_change_results_make_new_jobs(self, tmp_path, setting):
        """A finished job has the results of the value before."""
        earlier = plan_jobs(tmp_path, ["seed=0,1"])
        jobs = plan_jobs(tmp_path, [setting])
        assert jobs[:2] == earlier
        assert [setting in job.overrides for job in jobs] == [False, False, True, True]

    def test_another_path_than_several_earlier_ones_makes_new_jobs(self, tmp_path):
        jobs = plan_jobs(tmp_path, ["dataset=folder", "dataset.path=/a,/b"])
        jobs[0].folder.mkdir()
        (jobs[0].folder / "images.txt").touch()
        assert len(plan_jobs(tmp_path, ["dataset.path=/c"])) == 3

    def test_a_foreign_job_is_refused_before_its_images_are_read(self, tmp_path):
        job = ["dataset=folder", "dataset.path=/a", "hydra.searchpath=[file:///tmp/evil]"]
        (tmp_path / STATE_FILE).write_text(yaml.safe_dump({"overrides": [], "jobs": {"0": job}}))
        (tmp_path / "0").mkdir()
        (tmp_path / "0" / "images.txt").touch()
        with pytest.raises(InputError, match=rf"{STATE_FILE} contains hydra.searchpath=.*, which points outside"):
            plan_jobs(tmp_path, ["dataset.path=/b"])

    def test_an_axis_of_the_file_selects_no_config_directory(self, tmp_path):
        """The user's command gives another value of the same key."""
        plan_jobs(tmp_path, ["seed=0,1"], axes={"x": [f"hydra.searchpath=[{tmp_path}]"]})
        with pytest.raises(InputError, match=rf"{STATE_FILE} contains hydra.searchpath=.*, which points outside"):
            plan_jobs(tmp_path, ["hydra.searchpath=[/usr]"])

    def test_relative_paths_are_those_of_the_first_directory(self, tmp_path, monkeypatch):
        first = tmp_path / "first"
        first.mkdir()
        monkeypatch.chdir(first)
        plan_jobs(tmp_path / "sweep", ["dataset=folder", "dataset.path=images", "seed=0,1"])
        plan_jobs(tmp_path / "all", ["dataset=folder", f"dataset.path={first}/a,{first}/b", "dataset.cache=auto"])
        (first / "own").mkdir()
        for masks in ("own", "column"):
            plan_jobs(tmp_path / masks, ["final_evaluation=segmentation", f"final_evaluation.masks={masks}"])
        assert len(plan_jobs(tmp_path / "sweep", ["seed=2"])) == 3
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match=rf"final_evaluation.masks='own' in .* is relative to {first}"):
            plan_jobs(tmp_path / "own", [])
        assert len(plan_jobs(tmp_path / "column", [])) == 1
        with pytest.raises(
            InputError, match=rf"dataset.path=\S*images\S* in .* is relative to {first}.* resume it there"
        ):
            plan_jobs(tmp_path / "sweep", [])
        assert len(plan_jobs(tmp_path / "all", [])) == 2
        assert len(plan_jobs(tmp_path / "sweep", [f"dataset.path={first}/images"])) == 4  # seed=2, of other images
        assert len(plan_jobs(tmp_path / "sweep", [])) == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sweep.jobs=0", "must be an integer of at least 1"),
        ("sweep.retry=7", "must be true or false"),
        ("sweep.jobs=1,2", "an option of a sweep has one"),
        ("sweep={jobs:2}", "must name an option"),
    ],
)
def test_invalid_options(override, message):
    with pytest.raises(InputError, match=message):
        split_options(["seed=0,1", override])
