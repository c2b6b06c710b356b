"""Studies without training: learning rates, resuming with other code, and tables."""

from dataclasses import replace

import pytest
import torch

from benchmarks import study
from benchmarks.fedssl_bench.studies import STUDIES, VARIANTS, StudyJob
from benchmarks.study import CODE, Entry, best_rates, entry, folder_of, prepare, tables
from fedssl.config.load import compose
from fedssl.config.overrides import quote_value
from simulation.run import run

FEATARC = (
    *("experiment=many_rounds", "dataset=digits", "dataset.limit=40", "dataset.test_limit=40", "dataset.size=8"),
    *("engine=local", "num_clients=2", "partition=iid", "rounds=1", "evaluate_every=1", "checkpoint_every=1"),
    *("batch_size=8", "strategy=featarc", "strategy.clusters=2", "final_evaluation=knn", "evaluation=knn"),
)


def made(row, rate, seed, accuracy, part="tuning"):
    results = {"linear": accuracy, "linear_5_per_class": accuracy}
    return Entry(
        *("digits", part, row, rate, seed, results, results),
        rounds=[20],
        over_rounds={name: [value] for name, value in results.items()},
        norms={"shifts": [1.0, 0.5]},
        layers={"encoder.bias": [1.0, 0.5]},
        code=CODE,
        date="2026-11-27",
        machine="a processor",
        versions={},
        seconds=1.0,
    )


TUNED = [
    *(made("fedavg", 0.03, seed, accuracy) for seed, accuracy in ((100, 0.8), (101, 0.6))),
    *(made("fedavg", 0.1, seed, accuracy) for seed, accuracy in ((100, 0.75), (101, 0.74))),
    made("l_dawa", 0.3, 100, 0.7),
]


def test_rows_have_the_rate_of_the_best_tuning_mean():
    rows = [*TUNED, made("fedavg", 0.03, 0, 0.99, part="alpha 0.1")]
    assert best_rates("digits", rows) == {"fedavg": 0.1, "l_dawa": 0.3}


def test_tuned_rows_run_variants_with_the_rate_of_l_dawa():
    best = best_rates("digits", TUNED)
    jobs = STUDIES["digits"].jobs("digits", "alpha 0.1", best, None)
    assert {(job.row, job.rate) for job in jobs} == {("fedavg", 0.1), ("l_dawa", 0.3)}
    assert [job.seed for job in jobs[::2]] == [0, 1, 2, 3, 4]
    variants = STUDIES["digits"].jobs("digits", "variants", best, None)
    assert {(job.row, job.rate) for job in variants} == {(row, 0.3) for row in VARIANTS}


def test_every_row_composes():
    for name, definition in STUDIES.items():
        rates = {row: 0.1 for part in definition.parts.values() for row in part.rows}
        for part in definition.parts:
            first = {job.row: job for job in definition.jobs(name, part, rates, "/my/cifar10")}
            is_first_of_rows = name == "digits" and part in ("tuning", "variants")  # others have the same rows
            for job in list(first.values())[: None if is_first_of_rows else 1]:
                assert compose(job.overrides).seed == job.seed


@pytest.mark.parametrize(("code", "kept"), [(CODE, True), ("0123456789abcdef", False)])
def test_an_unfinished_run_of_other_code_starts_again(tmp_path, code, kept):
    job = StudyJob("digits", "alpha 0.1", "eua + fur", 0.1, 0, ("rounds=1",))
    folder = folder_of(job, tmp_path)
    (folder / "checkpoints").mkdir(parents=True)
    folder.with_suffix(".code").write_text(code)
    assert prepare(job, tmp_path, ()).folder == folder
    assert (folder / "checkpoints").exists() == kept
    assert folder.with_suffix(".code").read_text() == CODE


def test_tables_pair_seeds_and_name_entries_of_other_code(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ENTRIES", tmp_path / "studies.jsonl")
    untuned = made("l_dawa", 0.1, 0, 0.99, part="alpha 0.1")  # another rate than the best
    runs = [made("fedavg", 0.1, seed, 0.5 + seed / 10, part="alpha 0.1") for seed in (0, 1)]
    runs += [made("l_dawa", 0.3, seed, 0.52 + seed / 5, part="alpha 0.1") for seed in (0, 1)]
    old = replace(runs[0], code="0123456789abcdef", seed=7)
    study.add([*TUNED, untuned, *runs, old])
    study.add([replace(old, date="2026-11-28")])
    stored = list(study.read().values())
    assert len(stored) == len(TUNED) + 6
    text = tables("digits", stored)
    # Differences of 2 and 12 points: mean 7, standard deviation sqrt(50).
    assert "| l_dawa | 0.3 | 2 |" in text
    assert "7.0 ± 7.1" in text
    assert "99.0" not in text
    assert "0123456789abcdef (1, 2026-11-28)" in text


def test_norms_of_several_models_are_their_means(tmp_path):
    job = StudyJob("digits", "alpha 0.1", "featarc", 0.1, 0, ())
    folder = folder_of(job, tmp_path)
    prepare(job, tmp_path, ())
    run([*FEATARC, f"output_dir={quote_value(str(folder))}"])
    made = entry(job, folder)
    models = torch.load(folder / "checkpoints" / "round-000001.pt", weights_only=True)["models"]
    name = next(iter(made.layers))
    norms = [float(model["layers"][name].norm()) for model in models.values()]
    assert len(set(norms)) == 2
    assert made.layers[name][1] == pytest.approx(sum(norms) / 2, rel=1e-4)
    assert made.rounds == [1]
    assert all(len(values) == 2 for values in made.norms.values())


@pytest.mark.parametrize("option", [["--parts", "alpha"], ["--rows", "fedprox"], ["--rates", "0.5"], ["--seeds", "7"]])
def test_a_selection_that_the_study_lacks_is_refused(option, monkeypatch):
    monkeypatch.setattr("sys.argv", ["study.py", "digits", "--minutes", "0", *option])
    with pytest.raises(SystemExit, match=rf"^study: {option[0]} .* is not in the study; choose from "):
        study.main()


def test_a_study_without_a_process_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["study.py", "digits", "--minutes", "1", "--jobs", "0"])
    with pytest.raises(SystemExit, match="^study: --jobs 0 is not allowed; give at least 1$"):
        study.main()
