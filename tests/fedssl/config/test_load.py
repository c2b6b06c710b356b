import itertools
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fedssl.config.compose import RESULT_KEYS, RESUMABLE_KEYS, resolve_config
from fedssl.config.load import compose, load_settings
from fedssl.config.overrides import CONF, quote_value
from fedssl.config.saved_run import save_run
from fedssl.config.settings import check_channels
from fedssl.errors import InputError
from fedssl.evaluation.cli import compose_evaluation
from fedssl.machine import process
from fedssl.methods.base import build_method
from fedssl.rules import check_rules
from tests.cases import some
from tests.contexts import run_context

GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and folder.name != "experiment")
# Groups that know nothing of each other.
FREE = {"augmentation", "engine", "evaluation", "final_evaluation", "lr_schedule", "optimizer", "tracker"}
DATASETS = ("cifar10", "cifar100", "tiny_imagenet", "stl10", "folder", "medmnist", "digits")


def choices():
    """Words that choose every file of every group; those that are `FREE` of each other go together."""
    files = {}
    for group in GROUPS:
        paths = sorted((CONF / group).rglob("*.yaml"))
        files[group] = [f"{group}={path.relative_to(CONF / group).with_suffix('')}" for path in paths]
    together = itertools.zip_longest(*(files[group] for group in sorted(FREE)))
    alone = ([override] for group in GROUPS if group not in FREE for override in files[group])
    return [*([override for override in overrides if override] for overrides in together), *alone]


@pytest.mark.parametrize("overrides", some(choices(), default=choices()[::12]), ids=" ".join)
def test_every_file_composes(overrides):
    extra = ["dataset.path=/images"] if "dataset=folder" in overrides else []
    recording = compose([*overrides, *extra]).recording
    config = recording.config
    assert not OmegaConf.missing_keys(config)
    for group, name in (override.split("=") for override in overrides):
        assert recording.choices[group] == name
        assert group in config


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rouns=3"], r"no setting 'rouns'; did you mean rounds"),
        (["partition.alpa=0.1"], r"no setting 'partition.alpa'; did you mean partition.alpha"),
        (["+aggregation.min_update=2"], r"no setting aggregation.min_update; did you mean min_updates"),
        (["strategy=fedvag"], r"strategy=fedvag does not exist; did you mean fedavg .*; choose one of .*l_dawa"),
        (["strategy=fedavg,l_dwa"], r"strategy=l_dwa does not exist; did you mean l_dawa"),
        (["method=glob(fedu/*)"], r"method=glob\(fedu/\*\) matches no choice .* name some of .*fedu/byol"),
        (["method=glob([sim*,nix*])"], r"method=glob\(nix\*\) matches no choice"),
        (["rounds=many"], r"rounds=many must be an integer of at least 1; the default is 20"),
        (["rounds=1.5"], r"rounds=1.5 must be an integer of at least 1; the default is 20"),
        (["dataset=null"], r"dataset=null selects no choice of dataset; choose one of .*digits"),
        (
            ["evaluation=null"],
            r"evaluation=null selects no choice of evaluation; write evaluation=none, or choose one of",
        ),
        (["engine=null"], r"engine=null selects no choice of engine; choose one of auto"),
        (["strategy=[fedavg,l_dawa]"], r"strategy=\[fedavg,l_dawa\] selects no choice of strategy; choose one of"),
        (["seed={a:1}"], r"seed={'a': 1} must be an integer of at least 0; the default is 0"),
        (["aggregation=null"], r"aggregation=null replaces a group of settings; set each of them"),
        (["early_stopping=null"], r"early_stopping=null replaces a group of settings; set each of them"),
        (["client_state=null"], r"client_state=null replaces a group of settings; set each of them"),
        (["++statistics=3"], r"statistics=3 replaces a group of settings; set each of them"),
        (["dataset.splits=null"], r"dataset.splits=null replaces a group of settings; set each of them"),
        (["optimizer.lr=nan"], r"optimizer.lr=nan must be a finite number of at least 0; the default is 0.03"),
        (["optimizer.lr=inf"], r"optimizer.lr=inf must be a finite number of at least 0; the default is 0.03"),
        (
            ["dataset.mean=[nan]"],
            r"dataset.mean=\[nan\] must be a list of numbers from -100000 to 100000; the default is \[0.3053\]",
        ),
        (["output_dir="], r"output_dir is empty; set a path, or null"),
        (["rounds=${nothing}"], r"Interpolation key 'nothing' not found"),
        (["partition.alpha=true"], r"partition.alpha=true must be a number above 0; the default is 0.5"),
        (["rounds=0"], r"rounds=0 must be an integer of at least 1; the default is 20"),
        (["clients_per_round=11"], r"clients_per_round=11 is more than num_clients=10"),
        (["precision=fp8"], r"precision=fp8 must be fp32 or bf16; the default is fp32"),
        (["threads=0"], r"threads=0 must be an integer from 1 to 1024, or null; the default is null"),
        (["calibration.when=end"], r"calibration.when=end needs calibration=auxiliary"),
        (["privacy.clip_norm=1"], r"privacy.clip_norm=1 needs privacy=central; add it, or leave out privacy.clip_norm"),
        (
            ["secure_aggregation.clipping_range=8"],
            r"secure_aggregation.clipping_range=8 needs secure_aggregation=secagg_plus; add it",
        ),
        (["clip_norm=0"], r"clip_norm=0 must be a number above 0, or null; the default is null"),
        (["clip_norm=long"], r"clip_norm=long must be a number above 0, or null; the default is null"),
        (["seed=-1"], r"seed=-1 must be an integer of at least 0; the default is 0"),
        (["calibration=auxiliary", "calibration.dataset={a:1}"], "calibration.dataset={'a': 1} is no data set"),
        (["dataset.mean=[1,x]"], r"dataset.mean=\[1, 'x'\] must be a list of numbers"),
        (["~strategy"], r"~strategy deletes a required setting"),
        (["~evaluation"], r"~evaluation deletes a required setting"),
        (["strategy=["], r"the command line cannot be parsed"),
        (["rounds==3"], r"the command line cannot be parsed at 'rounds==3'; write key=value"),
        (["seed=1", "rounds =3"], r"the command line cannot be parsed at 'rounds =3'; write key=value without a space"),
        (["lr=0.1"], r"there is no setting 'lr'; did you mean optimizer.lr; `fedssl"),
        (["batchsize=3"], r"there is no setting 'batchsize'; did you mean batch_size; `fedssl"),
        (["dataset.path=/x"], r"no setting 'dataset.path', but dataset=.*folder.* has it: select it, or leave out da"),
        (["method=SimCLR"], r"method=SimCLR does not exist; did you mean simclr or"),
        (["seed=0,1"], r"^seed=0,1 has several values; set one, or a list as seed=\[...\], or add -m to the command"),
        (["seed=range(0,3)"], r"^seed=range\(0,3\) has several values"),
        (["rounds=2", "foo"], r"foo does not have the form key=value; write e.g. rounds=5"),
        (
            ["rounds=2 num_clients=3"],
            r"^'rounds=2 num_clients=3' has several settings; write each as a word",
        ),
        (["rounds='5'"], r"^rounds='5' must be an integer"),
        (["compile='true'"], r"^compile='true' must be true or false"),
        (["output_dir=None"], r"^output_dir=None is text; write output_dir=null for no value"),
        (["dataset=photos/cats"], r"dataset=photos/cats does not exist; set dataset=folder dataset.path=photos/cats"),
        (["+experiment=review"], r"^\+experiment=review is selected already; write it without \+"),
        (["+rouns=3"], r"^there is no setting 'rouns'; did you mean rounds"),
        (["++strategi.x=3"], r"^there is no setting 'strategi'; did you mean strategy"),
    ],
)
def test_wrong_words_get_one_sentence(overrides, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        compose(overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("calibration=auxiliary", r"calibration=auxiliary works on a model .* set calibration=none"),
        ("server_optimizer=fedadam", r"they share none; set server_optimizer=none"),
    ],
)
def test_what_needs_a_shared_model_is_refused_without_one(override, sentence):
    settings = compose(["strategy=local_only", override])
    context = run_context(build_method(settings.model), algorithm=settings.algorithm, calibration=settings.calibration)
    with pytest.raises(InputError, match=sentence) as caught:
        check_rules([settings.algorithm.strategy.instantiate().problem], context)
    assert "\n" not in str(caught.value)


def test_a_new_setting_is_for_interpolations():
    assert compose(["+base=2", "rounds=${base}"]).rounds == 2


@pytest.mark.parametrize("text", ["/tmp/a b", "/tmp/it's, [odd] {name}=1", "C:\\images\\", "/tmp/ünï"])
def test_any_path_survives_the_command_line(text):
    assert resolve_config([f"output_dir={quote_value(text)}"])[0].output_dir == str(Path(text).absolute())


def test_paths_have_no_parents_unless_behind_a_link(tmp_path, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "here" / "below")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path / "here")
    for text, expected in {
        "../images": "images",
        "below/../x": "here/x",
        "no/../x": "here/x",
        "../link/../x": "here/../link/../x",
        "../loop": "here/../loop",
    }.items():
        config, _ = resolve_config(["dataset=folder", f"dataset.path={text}"])
        assert config.dataset.path == str(tmp_path / expected)


class TestResume:
    @pytest.fixture
    def folder(self, tmp_path):
        save_run(compose(["rounds=4", "strategy=fedavg"]).recording, tmp_path)
        return tmp_path

    def test_takes_the_settings_of_the_run(self, folder):
        settings = load_settings([f"resume={folder}"])
        assert settings.algorithm.strategy.target == "strategies.fedavg.FedAvg"
        assert settings.rounds == 4
        assert settings.recording.resumed == 4
        assert settings.recording.folder == folder
        assert settings.recording.run_id == OmegaConf.load(folder / "config.yaml").run_id
        assert load_settings(settings.recording.overrides) == settings

    def test_keeps_the_threads_on_other_numbers_of_cores(self, tmp_path, monkeypatch, caplog):
        """The number of threads decides the order of sums."""
        monkeypatch.setattr(process, "available_cores", lambda: 3)
        save_run(compose(["dataset=cifar10"]).recording, tmp_path)
        monkeypatch.setattr(process, "available_cores", lambda: 1)
        assert compose(["dataset=cifar10"]).machine.threads == 1
        assert compose_evaluation([], run=tmp_path).machine.threads == 3
        settings = load_settings([f"resume={tmp_path}"])
        assert settings.machine.threads == 3
        assert load_settings(settings.recording.overrides).machine.threads == 3
        assert not caplog.messages
        for explicit, threads in (("threads=2", 2), ("threads=null", 1), ("++threads=2", 2)):
            assert load_settings([f"resume={tmp_path}", explicit]).machine.threads == threads
            assert (
                caplog.messages[-1]
                == f"threads={threads}, but the run had threads=3: results differ in their last bits"
            )
        assert compose_evaluation(["threads=2"], run=tmp_path).machine.threads == 2

    def test_takes_paths_of_which_earlier_versions_kept_the_parents(self, tmp_path):
        given = f"dataset.path={Path.cwd()}/../images"
        save_run(compose(["dataset=folder", given]).recording, tmp_path)
        file, path = tmp_path / "config.yaml", str(Path.cwd().parent / "images")
        file.write_text(file.read_text().partition("\n")[2].replace(path, f"{Path.cwd()}/../images"))
        assert load_settings([f"resume={tmp_path}"]).recording.config.dataset.path == path
        with pytest.raises(InputError, match=r"was run with dataset.path=\S*/\.\./images \(now"):
            load_settings([f"resume={tmp_path}", "dataset.path=images"])

    def test_replaces_an_evaluation_with_data_sets_of_its_own(self, tmp_path):
        own = ["final_evaluation=transfer", "+dataset@final_evaluation.datasets.a=digits"]
        save_run(compose(own).recording, tmp_path)
        final = load_settings([f"resume={tmp_path}", "final_evaluation=knn"]).evaluation.final_protocol
        assert (final.target, "datasets" in final.values) == ("fedssl.evaluation.knn.KNN", False)

    @pytest.mark.parametrize("given", [[], ["final_evaluation.masks=own"]])
    def test_keeps_masks_of_another_working_folder(self, tmp_path, monkeypatch, given):
        for name in ("here/masks", "here/own", "there/masks", "none"):
            (tmp_path / name).mkdir(parents=True)
        for start, resumed in (("here", "there"), ("none", "here"), ("here", "none")):
            monkeypatch.chdir(tmp_path / start)
            saved = compose(["final_evaluation=segmentation", *given]).recording
            save_run(saved, tmp_path)
            monkeypatch.chdir(tmp_path / resumed)
            again = load_settings([f"resume={tmp_path}"]).recording.config.final_evaluation.masks
            assert again == saved.config.final_evaluation.masks

    def test_refuses_other_settings(self, folder):
        with pytest.raises(InputError, match=r"was run with seed=0 \(now 1\)"):
            load_settings([f"resume={folder}", "seed=1"])

    def test_the_page_names_the_settings_that_may_change(self, folder):
        page = (CONF.parent / "docs" / "train.md").read_text()
        sentence = page.partition("You can raise `rounds`")[2].partition("others are rejected")[0]
        named = set(re.findall(r"`([a-z_.]+)`", sentence)) - {"progressive", "client_speed"}
        assert named <= RESUMABLE_KEYS | {"dataset.path"}
        assert named | {"rounds"} >= RESULT_KEYS
        with pytest.raises(InputError, match=r"was run with evaluation\.\S+=\S+ \(now"):
            load_settings([f"resume={folder}", "evaluation=linear"])

    def test_refuses_a_folder_whose_settings_were_edited(self, folder):
        file = folder / "config.yaml"
        text = file.read_text().replace("batch_size: 64", "batch_size: 32")
        file.write_text(text)
        message = r"config.yaml cannot be used \(its checksum is wrong: it was edited or is damaged\)"
        with pytest.raises(InputError, match=message):
            load_settings([f"resume={folder}"])
        file.write_text(text.partition("\n")[2])  # of an earlier version
        with pytest.raises(InputError, match=r"was run with batch_size=32 \(now 64\)"):
            load_settings([f"resume={folder}"])

    def test_refuses_a_folder_without_a_run(self, tmp_path):
        with pytest.raises(InputError, match="is not a run folder"):
            load_settings([f"resume={tmp_path / 'nothing'}"])


@pytest.mark.parametrize(("train", "test"), [("test", "test"), ("val", "validation"), ("a", "A")])
def test_refuses_a_test_that_has_the_labeled_training_images(train, test):
    overrides = ["dataset=cifar10", "dataset.path=/x", f"dataset.splits.train={train}"]
    message = "are the same images: .*; set dataset.splits.test to another split, or to null"
    with pytest.raises(InputError, match=message):
        compose([*overrides, f"dataset.splits.test={test}"])
    assert compose([*overrides, "dataset.splits.test=null"]).data.test is None
    assert compose([*overrides, "dataset.splits.test=other"]).data.test == "other"


def test_the_cache_folder_is_absolute_and_the_users_choice(tmp_path):
    def cache_of(settings):
        return settings.data.reader.values["cache"]

    overrides = ["dataset=cifar10", "dataset.path=/images"]
    assert cache_of(compose(overrides)) == "auto"
    assert cache_of(compose([*overrides, "dataset.cache=null"])) is None
    settings = compose([*overrides, "dataset.cache=here"])
    assert cache_of(settings) == str(Path("here").absolute())
    assert cache_of(compose([*overrides, "dataset.cache=3"])) == str(Path("3").absolute())
    save_run(settings.recording, tmp_path)
    assert cache_of(compose_evaluation([], run=tmp_path)) == "auto"
    assert cache_of(compose_evaluation(["dataset.cache=/mine"], run=tmp_path)) == "/mine"


@pytest.mark.parametrize("name", some(DATASETS, default=("cifar10", "folder", "digits")))
def test_statistics_follow_the_number_of_channels(name: str) -> None:
    default = compose([f"dataset={name}"]).data
    settings = compose([f"dataset={name}", f"dataset.channels={4 - default.channels}"])
    data = settings.data
    assert settings.training.augmentation.instantiate().channels == data.channels
    check_channels(data)
    assert data.mean == (sum(default.mean) / len(default.mean),) * data.channels
    assert data.std == (sum(default.std) / len(default.std),) * data.channels


def test_one_statistic_serves_all_channels() -> None:
    shape = ["dataset=cifar10", "dataset.path=/images", "dataset.channels=13", "augmentation=satellite"]
    data = compose([*shape, "dataset.mean=[0.2]", "dataset.std=[0.1]"]).data
    assert (data.mean, data.std) == ((0.2,) * 13, (0.1,) * 13)
    wrong = compose([*shape, "dataset.mean=[0.2,0.3,0.4]"]).data
    remedy = "dataset.mean=[0.2]"
    with pytest.raises(InputError, match=re.escape(f"set one number per channel, or one for all, such as {remedy}")):
        check_channels(wrong)
    check_channels(compose([*shape, remedy]).data)
