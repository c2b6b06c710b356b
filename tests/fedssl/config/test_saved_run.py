"""What a run folder says of its settings is proven before it is used."""

import shlex

import pytest
from flwr.common.config import parse_config_args
from omegaconf import OmegaConf

from fedssl.config.load import compose
from fedssl.config.saved_run import check_saved_overrides, read_settings, resume_command
from fedssl.errors import InputError
from server_app.app import overrides_of

GOOD = OmegaConf.to_yaml(compose(["seed=3"]).recording.config)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "config.yaml"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("seed: 3\n", "", "seed is missing or has the wrong type"),
        ("seed: 3\n", "seed: three\n", "seed is missing or has the wrong type"),
        ("seed: 3\n", "seed: ${rounds}\n", "an interpolation"),
        ("batch_size: 64\n", "batch_size: ${oc.env:HOME}\n", "an interpolation"),
        ("seed: 3\n", "seed: [3\n", "not valid YAML"),
        ("  size: 8\n", "  size: large\n", "dataset.size is missing or has the wrong type"),
        ("batch_size: 64\n", 'batch_size: "\\x24{oc.env:HOME}"\n', "an interpolation"),  # written in another way
        ("batch_size: 64\n", "batch_size: &a [1]\nother: *a\n", "an alias"),
        ("batch_size: 64\n", "batch_size: !!bool x\n", "the value of a tag has another form"),
        ("batch_size: 64\n", "batch_size: !!timestamp x\n", "the value of a tag has another form"),
        ("batch_size: 64\n", f"batch_size: {'[' * 40}{']' * 40}\n", "nested more than 32 levels"),
        (
            "  channels: 1\n",
            "  channels: 1\n  x: [{_target_: os.mkdir, path: /tmp/x}]\n",
            "dataset.x.0 has the key '_target_'",
        ),
        ("  channels: 1\n", "  channels: 1\n  _partial_: true\n", "dataset has the key '_partial_'"),
        ("  channels: 1\n", "", "dataset.channels is missing or has the wrong type"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(file, old, new, reason):
    start = GOOD.index(old, GOOD.index("\ndataset:") if old.startswith(" ") else 0)
    file.write_text(GOOD[:start] + new + GOOD[start + len(old) :])
    with pytest.raises(InputError, match=reason):
        read_settings(file)


@pytest.mark.parametrize("run_id", ["../x", "/x", "", "a/b", ".hidden", "x" * 100])
def test_a_run_id_is_no_path(file, run_id):
    text = OmegaConf.to_yaml(compose(["seed=3", "run_id=abc"]).recording.config)
    file.write_text(text.replace("run_id: abc", f"run_id: '{run_id}'"))
    with pytest.raises(InputError, match="is not a valid run id"):
        read_settings(file)


@pytest.mark.parametrize(
    "override",
    [
        "hydra.searchpath=[file:///tmp]",
        "hydra.run.dir=/tmp/x",
        "hydra/launcher=other",
        "+method/fedu=../../x",
        "strategy=[../../x]",
        "dataset._target_=os.mkdir",
        "++strategy._target_=os.mkdir",
        "+method.x={_target_:os.mkdir}",
        "+method.x=[{y:{_target_:os.mkdir}}]",
        "dataset.path='${oc.env:HOME}'",
        "seed=${oc.env:HOME}",
        "+x={y:'${oc.env:HOME}'}",
        "dataset.cache=/tmp/x",
        "calibration.dataset.cache=/tmp/x",
        "calibration.dataset={cache:/tmp/x}",
        "engine.address=10.0.0.1:6379",
        "tracker.uri=http://10.0.0.1:5000",
        "tracker.mode=online",
    ],
)
def test_overrides_outside_the_folder_need_the_users_word(file, override):
    message = "points outside the run folder and is accepted only from your own command"
    with pytest.raises(InputError, match=message) as caught:
        check_saved_overrides([override], file)
    assert override in str(caught.value)


def test_all_overrides_outside_the_folder_are_named_at_once(file):
    with pytest.raises(InputError, match="contains tracker.mode=slow, engine.address=x:1, each of which points"):
        check_saved_overrides(["tracker.mode=slow", "seed=1", "engine.address=x:1"], file)


def test_the_resuming_command_repeats_what_folders_may_not_set(tmp_path):
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "overrides.yaml").write_text("""[seed=3, "dataset.cache='/my data'", tracker.uri=x]""")
    assert resume_command(folder) == f"fedssl 'dataset.cache=/my data' tracker.uri=x 'resume={folder}'"
    fleet = ["engine=deployment", "engine.signing_key=/a.key", "engine.root_certificates=/ca.crt"]
    (folder / "overrides.yaml").write_text(f"[seed=3, {', '.join(fleet)}]")
    assert resume_command(folder) == f"fedssl {' '.join(fleet)} 'resume={folder}'"
    (folder / "devices.json").write_text("{}")
    assert resume_command(folder) == f"fedssl {' '.join(fleet)} 'resume={folder}'"
    (folder / "overrides.yaml").write_text("[seed=3]")  # of `flwr run`
    words = shlex.split(resume_command(folder))
    assert words[:-1] == ["flwr", "run", ".", "FEDERATION", "--stream", "--run-config"]
    assert overrides_of(parse_config_args([words[-1]])) == [f"resume='{folder}'"]
    (folder / "devices.json").unlink()
    (folder / "overrides.yaml").write_text("[seed=")
    assert resume_command(folder) == f"fedssl 'resume={folder}'"


def test_words_that_choose_by_name_are_taken(file):
    overrides = ["strategy=fedavg", "method=fedu/byol", "+experiment=lw_fedssl/fll"]
    overrides += ["dataset.path=/data/x", "dataset.cache=auto"]
    overrides += ["dataset.cache=null", "partition.alpha=0.1", "dataset.mean=[0.5]"]
    overrides += ["~evaluation", "engine.address=null"]
    assert check_saved_overrides(overrides, file) is None
