"""Runs that pause after a round, and continue with the same bits."""

import json
from itertools import count
from types import SimpleNamespace

import pytest

from fedssl.config.commands import encoder_file
from fedssl.errors import InputError
from fedssl.logs import log_once
from fedssl.pretrained.sources import file_of
from fedssl.runs.run import read_run
from server_app import training_loop
from simulation.run import run
from tests.runs import KNN, SMALL, ending

QUICK = [*SMALL, *KNN, "lr_schedule=cosine", "checkpoint_every=3"]


def test_a_paused_run_continues_with_the_same_bits(tmp_path):
    run([*QUICK, f"output_dir={tmp_path / 'whole'}"])
    paused = tmp_path / "paused"
    run([*QUICK, "pause_after=1", f"output_dir={paused}"])
    assert ending(paused) == ("paused", 1, "paused after round 1 of 3")
    assert not (paused / "encoder.pt").exists()
    assert f"paused after round 1; continue with: fedssl resume={paused}" in (paused / "run.log").read_text()
    run([f"resume={paused}", "pause_after=2"])
    for override, message in (
        ("pause_after=2", "pause_after=2 but the run has completed 2 of 3 rounds; set pause_after=3 or more"),
        (f"output_dir={tmp_path}", f"output_dir={tmp_path} but resume={paused} continues in its folder; leave output"),
    ):
        with pytest.raises(InputError, match=message):
            run([f"resume={paused}", override])
        assert ending(paused) == ("paused", 2, "paused after round 2 of 3")
    run([f"resume={paused}"])  # the pause is not inherited
    assert ending(paused) == ("finished", 3, None)
    assert (paused / "encoder.pt").read_bytes() == (tmp_path / "whole" / "encoder.pt").read_bytes()
    assert read_run(paused).command_overrides == read_run(tmp_path / "whole").command_overrides


def test_the_encoder_of_a_continued_run_is_a_warning(tmp_path, caplog):
    folder = tmp_path / "run"
    run([*QUICK, "rounds=1", f"output_dir={folder}"])
    stored = (folder / "encoder.pt").read_bytes()

    (folder / "initial_encoder.pt").write_bytes(stored)  # from which a run with encoder.weights is resumed

    def warnings(read, source):
        caplog.clear()
        log_once.cache_clear()
        read(source)
        return list(caplog.messages)

    reads = [(encoder_file, folder), (encoder_file, folder / "encoder.pt")]
    reads += [(file_of, str(folder)), (file_of, str(folder / "encoder.pt"))]
    assert [warnings(*one) for one in reads] == [[]] * 4
    run([f"resume={folder}", "rounds=3", "pause_after=2"])
    assert (folder / "encoder.pt").read_bytes() == stored
    expected = f"the run {folder} is not finished, and its encoder may be of an earlier round; finish the run with "
    assert [warnings(*one) for one in reads] == [[f"{expected}fedssl resume={folder}"]] * 4
    assert warnings(file_of, str(folder / "initial_encoder.pt")) == []


def test_a_continued_run_has_no_summary_of_its_former_end(tmp_path, monkeypatch):
    """Else it would count as finished, with results of fewer rounds, if its process is killed."""
    folder, found, run_round = tmp_path / "run", [], training_loop.run_round
    run([*QUICK, "rounds=1", f"output_dir={folder}"])

    def observed(*args, **options):
        found.append(read_run(folder).summary)
        return run_round(*args, **options)

    monkeypatch.setattr(training_loop, "run_round", observed)
    run([f"resume={folder}"])
    assert (found, ending(folder)) == ([], ("finished", 1, None))
    run([f"resume={folder}", "rounds=2"])
    assert (found, ending(folder)) == ([None], ("finished", 2, None))


def test_seconds_of_the_summary_are_of_all_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=count(step=1000).__next__))  # of rounds
    run([*QUICK, "pause_after=2", f"output_dir={tmp_path}"])
    run([f"resume={tmp_path}"])
    assert 2000 < json.loads((tmp_path / "summary.json").read_text())["seconds"] < 3000


def test_pausing_at_or_after_the_last_round_has_no_effect(tmp_path):
    run([*QUICK, "pause_after=3", f"output_dir={tmp_path / 'run'}"])
    assert ending(tmp_path / "run") == ("finished", 3, None)
