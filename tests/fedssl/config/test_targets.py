"""Settings and classes of the user's own: found, saved, refused."""

import sys

import pytest

from fedssl.config.compose import validate_names
from fedssl.config.load import compose, load_settings
from fedssl.config.overrides import config_groups, quote_value
from fedssl.config.saved_run import save_run
from fedssl.config.targets import (
    SEARCHPATH_KEY,
    choice_targets,
    expand_config_dir_flag,
    normalize,
    search_folders,
    user_encoder,
)
from fedssl.encoders import conv_small
from fedssl.errors import InputError
from fedssl.evaluation.cli import compose_evaluation
from fedssl.export import cli as export
from fedssl.export import save_encoder

MODULE = """
from strategies.fedavg import FedAvg
from fedssl.encoders import conv_small


class Mine(FedAvg):
    pass


def encoder(*, channels, size, width):
    return conv_small(channels=channels, size=size, width=width)
"""
FILES = {
    "strategy/mine.yaml": "_target_: {package}.Mine\nweighting: uniform\nreported_metrics: [seconds]\n",
    "encoder/mine.yaml": "_target_: {package}.encoder\nchannels: 1\nsize: ${{dataset.size}}\nwidth: 4\n",
    "method/lab/simclr.yaml": "defaults:\n  - /method/simclr@_here_\ntemperature: 0.07\n",
    "experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /strategy: mine\nrounds: 7\n",
}


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """A folder with an unpleasant name, and a package that can be imported."""
    package = f"lab_{abs(hash(tmp_path))}"  # a module is imported once per process
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / f"{package}.py").write_text(MODULE)
    folder = tmp_path / "it's [mine], a=b"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text.format(package=package))
    monkeypatch.syspath_prepend(tmp_path / "src")
    return folder


def words_for(folder, *overrides):
    return expand_config_dir_flag(["--config-dir", str(folder), *overrides])


class TestTheFlag:
    @pytest.mark.parametrize("flag", [["--config-dir", "conf"], ["-cd", "conf"], ["--config-dir=conf"]])
    def test_becomes_a_word_with_the_whole_path(self, tmp_path, monkeypatch, flag):
        (tmp_path / "conf").mkdir()
        monkeypatch.chdir(tmp_path)
        override = f"{SEARCHPATH_KEY}=['file://{tmp_path}/conf']"
        # Words stand together, as Hydra wants them, whatever stands between.
        assert expand_config_dir_flag([*flag, "-m", "a=1", "b=2"]) == ["-m", override, "a=1", "b=2"]
        assert expand_config_dir_flag(["--cfg", "job", "a=1", *flag]) == ["--cfg", "job", override, "a=1"]
        assert expand_config_dir_flag([*flag, "--help"]) == [override, "--help"]

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["a=1", "--config-dir"], "--config-dir needs a folder; name the one with strategy/"),
            (["-cd", "/nowhere"], "the config directory /nowhere does not exist; set --config-dir"),
            (["rounds=5", ""], "an argument is empty; leave it out"),
            ([f"{SEARCHPATH_KEY}=conf"], "hydra.searchpath=conf must be a list of folders; write --config-dir FOLDER"),
        ],
    )
    def test_wrong_ones_get_one_sentence(self, arguments, sentence):
        with pytest.raises(InputError, match=sentence) as caught:
            normalize(expand_config_dir_flag(arguments))
        assert "\n" not in str(caught.value)


class TestChoices:
    def test_are_those_of_both(self, conf):
        both, own = config_groups([conf]), config_groups()
        assert set(both["strategy"]) == {*own["strategy"], "mine"}
        assert "lab/simclr" in both["method"]
        assert both["tracker"] == own["tracker"]

    def test_wrong_ones_are_answered_with_them(self, conf):
        with pytest.raises(InputError, match=r"strategy=mein does not exist; did you mean .*mine.*; choose one of"):
            validate_names(words_for(conf, "strategy=mein,fedavg"))
        with pytest.raises(InputError, match=r"no setting 'strategy.weightin'; did you mean strategy.weighting"):
            validate_names(words_for(conf, "strategy=mine", "strategy.weightin=uniform"))
        with pytest.raises(InputError, match="strategy=mine does not exist"):
            validate_names(["strategy=mine"])

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            (b"rounds: 7\n", "the file of experiment=NAME sets nothing; let it begin with the line # @package"),
            (b"\xef\xbb\xbf# @package _global_\nrounds: 7\n", "save it without a byte order mark"),
            (b"# @package _global_\nrouns: 7\n", "there is no setting 'rouns'; did you mean rounds"),
            (b"# @package _global_\nrounds: [7\n", "mine.yaml"),
            (b"# @package _global_\nrounds:\t7\n  seed: 1\n", "mine.yaml"),
            (b"# @package _global_\nteacher: caf\xe9\n", "is not UTF-8"),
        ],
    )
    def test_wrong_files_get_one_sentence(self, conf, text, sentence):
        (conf / "experiment" / "mine.yaml").write_bytes(text)
        with pytest.raises(InputError, match=sentence) as caught:
            compose(words_for(conf, "experiment=mine"))
        assert "\n" not in str(caught.value)

    def test_files_have_any_line_ends_and_names_of_their_own(self, conf):
        text = "# @package _global_\r\nbase: 7\r\nrounds: ${base}\r\noutput_dir: a b\r\n"
        (conf / "experiment" / "mine.yaml").write_bytes(text.encode())
        settings = compose(words_for(conf, "experiment=mine"))
        assert (settings.rounds, settings.recording.folder.name) == (7, "a b")

    def test_are_saved_with_the_run(self, conf, tmp_path):
        (tmp_path / "run").mkdir()
        save_run(compose(words_for(conf, "strategy=mine")).recording, tmp_path / "run")
        message = "contains hydra.searchpath=.* points outside the run folder .* --config-dir"
        with pytest.raises(InputError, match=message):
            load_settings([f"resume={quote_value(str(tmp_path / 'run'))}"])
        resumed = load_settings(words_for(conf, f"resume={quote_value(str(tmp_path / 'run'))}"))
        assert resumed.algorithm.strategy.name == "Mine"
        assert search_folders(resumed.recording.overrides) == [conf]
        moved = conf.rename(tmp_path / "moved")
        with pytest.raises(InputError, match="the config directory .* does not exist; set --config-dir"):
            load_settings(words_for(conf, f"resume={quote_value(str(tmp_path / 'run'))}"))
        resumed = load_settings(words_for(moved, f"resume={quote_value(str(tmp_path / 'run'))}"))
        assert search_folders(resumed.recording.overrides) == [moved]


class TestTargets:
    @pytest.mark.parametrize(
        ("target", "sentence"),
        [
            ("nowhere.Mine", "there is no module nowhere; install its package, or add its folder to PYTHONPATH"),
            ("fedssl.nowhere.Mine", "there is no module fedssl.nowhere; install"),
            ("strategies.fedavg.FedAgv", "strategies.fedavg has no class or function FedAgv; did you mean FedAvg"),
            ("broken.Mine", "broken fails with ZeroDivisionError: division by zero; correct that"),
            ("lacking.Mine", "lacking needs not_there; install that"),
            ("Mine", "strategy._target_=Mine is not the dotted name of a class or function"),
        ],
    )
    def test_that_cannot_be_imported_are_refused_before_any_work(self, tmp_path, monkeypatch, target, sentence):
        (tmp_path / "broken.py").write_text("1 / 0\n")
        (tmp_path / "lacking.py").write_text("import not_there\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(InputError, match=sentence) as caught:
            compose(["strategy=fedavg", f"strategy._target_={target}"])
        assert "\n" not in str(caught.value)
        assert f"strategy._target_={target}" in str(caught.value)

    def test_a_choice_without_one_is_refused(self, tmp_path):
        (tmp_path / "method").mkdir()
        (tmp_path / "method" / "mine.yaml").write_text("weight: 1\n")
        with pytest.raises(InputError, match="^method=mine has no _target_; add a line with the dotted name of"):
            compose(words_for(tmp_path, "method=mine"))

    def test_of_the_current_folder_are_found_with_a_config_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", list(sys.path))
        (tmp_path / "here_only.py").write_text(MODULE)
        (tmp_path / "conf").mkdir()
        monkeypatch.chdir(tmp_path)
        overrides = ["strategy=fedavg", "strategy._target_=here_only.Mine"]
        with pytest.raises(InputError, match="there is no module here_only"):
            compose(overrides)
        assert compose(words_for("conf", *overrides)).algorithm.strategy.name == "Mine"
        assert sys.path[-1] == str(tmp_path)

    def test_of_the_current_folder_are_found_by_an_export(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", list(sys.path))
        (tmp_path / "here_exported.py").write_text(MODULE)
        (tmp_path / "conf" / "encoder").mkdir(parents=True)
        (tmp_path / "conf" / "encoder" / "mine.yaml").write_text("_target_: here_exported.encoder\n")
        monkeypatch.chdir(tmp_path)
        settings = {"_target_": "here_exported.encoder", "channels": 1, "size": 8, "width": 4}
        encoder = conv_small(channels=1, size=8, width=4)
        save_encoder("encoder.pt", encoder, settings=settings, mean=[0.5], std=[0.5], metadata={})
        command = ["fedssl-export", "--config-dir", "conf", "encoder=encoder.pt", "format=safetensors"]
        monkeypatch.setattr("sys.argv", command)
        assert export.main() == 0
        assert (tmp_path / "encoder.safetensors").exists()

    def test_an_encoder_is_built_if_overrides_name_its_folder(self, conf):
        (target,) = choice_targets("encoder", [conf]) - choice_targets("encoder", [])
        assert user_encoder(target, [conf])(channels=1, size=8, width=4).feature_dim == 16
        assert user_encoder(target, []) is None
        assert user_encoder("os.system", [conf]) is None
        assert user_encoder("fedssl.encoders.conv_small", [conf]) is None

    def test_a_run_folder_cannot_choose_code_as_data_set(self, tmp_path):
        save_run(compose([]).recording, tmp_path)
        assert compose_evaluation([], run=tmp_path).data.name == "digits"
        file = tmp_path / "config.yaml"
        _, _, text = file.read_text().partition("\n")  # without checksum
        file.write_text(text.replace("fedssl.datasets.digits.read", "os.mkdir"))
        message = "is read by os.mkdir, which is not part of fedssl; name its config directory"
        with pytest.raises(InputError, match=message):
            compose_evaluation([], run=tmp_path)
