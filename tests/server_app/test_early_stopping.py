"""Runs that end early: what their folder says, and how they go on."""

import pytest

from fedssl.errors import InputError
from fedssl.export import read_content
from fedssl.report.accuracy_table import run_results
from fedssl.runs.run import find_runs
from server_app.checkpoint import latest_checkpoint
from simulation.run import run
from tests.runs import KNN, SMALL, ending, model_bits, read_lines, read_summary

WORDS = [*SMALL, *KNN, "checkpoint_every=3"]
# Nothing is more than 100 points better: the second evaluation ends the run.
STOP = ["early_stopping.monitor=knn", "early_stopping.patience=1", "early_stopping.min_delta=1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run([*WORDS, f"output_dir={folder / 'whole'}"])
    run([*WORDS, *STOP, f"output_dir={folder / 'early'}"])
    return folder


def test_a_run_ends_early_and_goes_on(folders):
    early, reason = folders / "early", "knn did not improve by more than 1 in 1 evaluation after round 1"
    assert ending(early) == ("finished", 2, reason)
    assert latest_checkpoint(early / "checkpoints").round == 2  # although a checkpoint was due in round 3
    assert f"early_stopping: {reason}; the run stops after round 2 of 3" in (early / "run.log").read_text()
    assert read_content(early / "encoder.pt")["metadata"]["rounds"] == 2  # that the encoder has seen
    text = run_results(find_runs([folders])).table().text()
    assert f"ended by early_stopping:\n\n  {early}: after 2 of 3 rounds" in text
    final = read_summary(early)["final"]["federated"]
    assert final == read_lines(early / "metrics.jsonl")[1]["evaluation"]  # of the last round, whichever was the best
    before = model_bits(early)
    run([f"resume={early}"])  # the rule holds still
    assert (ending(early), model_bits(early)) == (("finished", 2, reason), before)
    run([f"resume={early}", "early_stopping.monitor=null", "early_stopping.patience=null"])
    assert ending(early) == ("finished", 3, None)
    assert model_bits(early) == model_bits(folders / "whole")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["evaluation=linear"], "early_stopping.monitor=knn is not a result of evaluation, which has linear; choose"),
        (["evaluation=none"], "which has none; choose another evaluation"),
        (
            ["early_stopping.threshold=92", "early_stopping.min_delta=0"],
            r"early_stopping.threshold=92 but knn is in \[0, 1\]; for 92% set early_stopping.threshold=0.92",
        ),
        (["early_stopping.min_delta=1.5"], r"early_stopping.min_delta=1.5 but knn is in \[0, 1\]"),
        (
            ["schedule=layer_wise", "rounds=4"],
            r"of 4 stages before its last; set schedule=end_to_end, or( early_stopping.\w+=null){3}$",
        ),
        (
            ["dataset.splits.test=null"],
            "early_stopping.monitor=knn needs evaluations; the data set has no labeled test",
        ),
    ],
)
def test_what_no_round_will_have_is_refused_before_the_first(tmp_path, overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        run([*WORDS, *STOP, *overrides, f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
