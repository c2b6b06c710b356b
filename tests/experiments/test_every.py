"""Every experiment is a whole: it composes, says what it needs to, its commands exist, and it runs."""

import re
from itertools import groupby

import pytest
from omegaconf import OmegaConf

from fedssl.config.compose import resolve_config, validate_names
from fedssl.config.load import compose
from fedssl.report.paper_table import read_table, table_names
from simulation.run import run
from tests.cases import some
from tests.experiments.every import (
    EXPERIMENTS,
    GROUPS,
    OF_PAPERS,
    check_saved_overrides,
    commands,
    head,
    jobs,
    small,
    write_images,
    written,
)
from tests.methods import teacher_file
from tests.runs import read_summary

UNUSED = {"rounds", "local_epochs", "partition", "partition.alpha"}  # `small` sets them, or no code depends on them


def kind_of_run(name):
    """Return what decides which code an experiment's run executes: its base, and what it changes of that."""
    below, overrides, _ = written(name)
    changed = [override for override in overrides if override.removesuffix("=1") not in UNUSED]
    return kind_of_run(*below) if below and not changed else (*below, *changed)


SAME_RUN = {}  # the experiments of each kind, by the first
for _, names in groupby(sorted(EXPERIMENTS, key=kind_of_run), kind_of_run):
    SAME_RUN |= {(same := [*names])[0]: same}

# What is run by default: each has a rule, a method, a schedule or an evaluation that the others have not.
QUICK = {"dec_ssl/table2_transfer"}  # test_digests.py trains the parts of lw_fedssl


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_images(folder, splits={"train": 60, "test": 20, "valid": 20, "unlabeled": 60})
    return folder


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_and_its_commands_use_existing_names(name):
    below, choices, _ = written(name)
    assert set(below) <= set(EXPERIMENTS)
    for overrides in (choices, *commands(head(name))):
        check_saved_overrides(overrides)


@pytest.mark.parametrize("name", OF_PAPERS)
def test_a_head_has_table_command_and_differences(name):
    """Rows of a table (LW-FedSSL's Table 3) leave to their base what they share with it."""
    text = head(name)
    assert re.search(r"arXiv \d{4}\.\d{5}", text)
    assert any(
        f"experiment={name}" in override or f",{name}" in override
        for overrides in commands(text)
        for override in overrides
    ) or (name in ("l_dawa/base", "fedu/base"))
    if re.search(r"/(table|figure)\d", name):
        kind, number = re.search(r"/(table|figure)(\d+)", name).groups()
        assert re.search(rf"{kind.capitalize()}s? [^:]*\b{number}\b", text)
        for part in ("# Hours", "[Tt]he paper", "Not known|Different"):
            assert re.search(part, text), part


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_head_lacks_a_data_set_that_exists(name):
    text = re.sub(r"[^a-z0-9]", "", re.sub("\n# ", " ", head(name)).lower())
    for dataset in GROUPS["dataset"]:
        assert not re.search(rf"{re.sub('[^a-z0-9]', '', dataset)}.{{0,80}}isnotincluded", text), dataset


@pytest.mark.heavy
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_of_the_commands_composes(name):
    for overrides in commands(head(name)):
        validate_names(overrides)
        for job in jobs(overrides) if name.replace("/", ".") not in table_names() else ():  # see test_paper_table.py
            compose(job).algorithm.strategy.instantiate()


@pytest.mark.parametrize("name", some(SAME_RUN, default=QUICK))
def test_an_experiment_runs(tmp_path, data, name):
    overrides = [f"experiment={name}"]
    for same in reversed(SAME_RUN[name]):
        config, choices = resolve_config([f"experiment={same}"])
        assert not OmegaConf.missing_keys(config)
        assert choices["experiment"] == same
        assert config.num_clients == written(same)[2]
    if choices["method"] == "distillation":
        overrides.append(f"teacher={teacher_file()}")
    run([*overrides, *small(config, data=data), f"output_dir={tmp_path / 'run'}"])
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "finished"
    assert all(0 <= value <= 1 for value in summary["final"]["federated"].values())
    assert bool(summary["final"]["federated"]) == (name != "l_dawa/figure4")
    for table in {same.replace("/", ".") for same in SAME_RUN[name]} & {*table_names()}:
        for cell in read_table(table):  # fedssl-report finds what stands beside the paper's numbers
            assert cell.results[0] in summary["final"][cell.encoder_kind], cell
