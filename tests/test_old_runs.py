"""Run folders of commit 3b69ec0, in ``data/old_runs``: all commands read them, and resuming them is rejected.

The names of settings, classes and checkpoints have changed since. ``finished`` has ``strategy=loss partition=classes
keep_models=2 'augmentation.views=[...]'`` and others, ``interrupted`` has ``method=byol strategy=fedu``.
"""

import shutil
from pathlib import Path

import pytest

from fedssl.config.load import load_settings
from fedssl.config.renamed import SETTINGS
from fedssl.config.saved_run import read_overrides, read_settings
from fedssl.errors import InputError
from fedssl.evaluation import cli as evaluate
from fedssl.export import cli as export
from fedssl.export import load_encoder
from fedssl.report import cli as report
from fedssl.runs import cli as runs
from fedssl.runs.loaded_run import load_run_folder
from fedssl.runs.run import read_run
from simulation import cli

DATA = Path(__file__).parent / "data/old_runs"


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(DATA, tmp_path / "old"))


@pytest.fixture
def command(monkeypatch, capsys):
    """Call a command; return its exit status and output."""

    def call(main, *arguments):
        monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out + err

    return call


@pytest.mark.parametrize("name", ["finished", "interrupted"])
def test_settings_have_current_names(old, name):
    run, saved = read_run(old / name), read_settings(old / name / "config.yaml")
    for settings in (run.settings, saved):
        assert not {"transport", "updates", "stop_when", "secure"} & set(settings)
        assert settings["aggregation"]["min_updates"] == 2
    for overrides in (run.overrides, run.command_overrides, read_overrides(old / name / "overrides.yaml")):
        given = {override.partition("=")[0] for override in overrides}
        assert not given & set(SETTINGS)
        assert {"collapse_images", "reply_timeout", "method.projector.hidden_dim"} <= given
    assert run.choices["secure_aggregation"] == "none"
    assert run.choices["strategy"] == ("loss_weighted" if name == "finished" else "fedu")
    assert "secure" not in run.choices


def test_reports_list_them(old, command, tmp_path):
    code, out = command(report.main, old, "--out", tmp_path / "table.md")
    assert code in (0, None), out
    assert "loss_weighted" in out
    for plot in ("metrics", "cosines", "partition", "spectrum"):
        code, out = command(report.main, old / "finished", "--figures", plot, "--into", tmp_path)
        assert code in (0, None), out


def test_runs_list_them(old, command):
    code, out = command(runs.main, "list", old, "strategy=loss_weighted", "aggregation.max_retries=1")
    assert (code, out.count("finished")) == (0, 2), out
    code, out = command(runs.main, "show", old / "finished")
    assert code == 0, out
    assert "early_stopping.monitor" in out
    for override, new in ("updates.repeats=1", "aggregation.max_retries"), ("strategy=loss", "strategy=loss_weighted"):
        code, out = command(runs.main, "list", old, override)
        assert code == 2
        assert f"is now {new}" in out


def test_their_encoders_are_evaluated_and_exported(old, command, tmp_path):
    folder = old / "finished"
    code, out = command(evaluate.main, f"run={folder}", "evaluation=knn", "threads=1")
    assert code in (0, None), out
    assert "knn" in out
    code, out = command(export.main, f"run={folder}", "format=torch_export", f"output={tmp_path / 'encoder.pt2'}")
    assert code in (0, None), out
    assert load_encoder(folder / "encoder.pt").feature_dim == 4


def test_their_snapshots_are_loaded(old):
    loaded = load_run_folder(old / "finished", [])
    assert loaded.settings.algorithm.strategy.name == "LossWeighted"
    with loaded.loaded(loaded.only_model(loaded.snapshots[-1], figure="a figure"), round=2) as method:
        assert method is not None


@pytest.mark.parametrize("name", ["finished", "interrupted"])
def test_resuming_is_rejected_with_one_sentence(old, command, name):
    rounds = "rounds=31" if name == "interrupted" else "rounds=3"
    assert load_settings([f"resume={old / name}", rounds]).recording.resumed  # the settings are the same
    code, out = command(cli.main, f"resume={old / name}", rounds)
    assert code == 2
    lines = [line for line in out.splitlines() if "checkpoint" in line]
    assert len(lines) == 1, out


def test_an_old_name_in_the_command_is_rejected(old):
    with pytest.raises(InputError, match=r"^updates\.repeats is now aggregation\.max_retries$"):
        load_settings([f"resume={old / 'finished'}", "updates.repeats=2"])
