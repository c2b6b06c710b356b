"""A paper's table beside runs: the numbers, which runs belong to which, and what differs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedssl.config.compose import resolve_config
from fedssl.config.load import compose
from fedssl.config.saved_run import save_run
from fedssl.report.paper_table import Differences, PaperRow, match_runs, read_table, table_names
from fedssl.runs.run import find_runs
from tests.cases import some
from tests.experiments.every import EXPERIMENTS, check_saved_overrides, commands, head, jobs
from tests.runs import change_summary, write_run

NAMES = table_names()
TABLE1 = ["experiment=l_dawa/table1", "strategy=l_dawa", "local_epochs=5"]


def job(folder: Path, *overrides: str, **final: dict[str, float]) -> Path:
    """A finished run with these words and results."""
    folder.mkdir(parents=True)
    settings = compose(list(overrides))
    settings.algorithm.strategy.instantiate()
    save_run(settings.recording, folder)  # the first file, whose time is that of the run
    return write_run(folder, (), final=final)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    job(folder / "0", *TABLE1, "seed=0", "dataset.path=/here", federated={"linear": 0.61}, untrained={"linear": 0.2})
    job(folder / "1", *TABLE1, "seed=1", "precision=fp32", federated={"linear": 0.65})
    shutil.copytree(folder / "1", folder / "again")  # repeats a seed, with another result
    change_summary(folder / "again", final={"federated": {"linear": 0.1}})
    job(
        folder / "small",
        *TABLE1,
        "rounds=3",
        "dataset.limit=500",
        "final_evaluation.epochs=1",
        federated={"linear": 0.4},
    )
    job(folder / "knn", *TABLE1, "strategy=fedavg", "final_evaluation=knn", federated={"knn": 0.4})
    ten = {"linear": 0.5, "linear_l_dawa": 0.69}
    job(folder / "10", *TABLE1[:2], "local_epochs=10", federated=ten)
    # Not made with experiment=l_dawa/table1, and the same run as one of it.
    same = ["experiment=l_dawa/table3", "strategy=fedavg", "local_epochs=1", "rounds=10"]
    job(folder / "other", *same, federated={"linear": 0.529})
    job(folder / "digits", "strategy=l_dawa", federated={"linear": 0.9})
    return folder


def texts(lines: list[PaperRow]) -> Iterator[tuple[object, ...]]:
    """Strategy, epochs, the paper's, ours, difference, runs and what differs, of every line."""
    for line in lines:
        ours = line.ours and (round(100 * line.ours.value, 6), line.ours.std and round(100 * line.ours.std, 6))
        settings = line.number.settings
        difference = None if line.difference is None else round(line.difference, 6)
        kind = settings["strategy"], settings["local_epochs"]
        yield (*kind, line.number.value, ours, difference, line.runs, line.differs)


def test_runs_stand_beside_the_numbers_of_their_settings(runs):
    """Mean of 61 and 65 is 63, 2.44 below 65.44; deviation sqrt((4 + 4) / 1) = 2.828427."""
    lines = list(texts(match_runs("l_dawa.table1", find_runs([runs]))[0]))
    exact = ("l_dawa", "5", 65.44, (63.0, 2.828427), -2.44, 2, {})
    small = {"rounds": ("3", "10"), "dataset.limit": ("500", "None")}
    small |= dict.fromkeys(("final_evaluation.batch_norm_epochs", "final_evaluation.epochs"), ("1", "100"))
    position = lines.index(exact)
    assert lines[position + 1] == ("l_dawa", "5", 65.44, (40.0, None), -25.44, 1, small)
    assert ("fedavg", "1", 52.90, (52.9, None), 0.0, 1, {}) in lines
    assert ("fedavg", "5", 63.76, None, None, 1, {}) in lines  # judged by neighbours only
    found = [line[1:4] for line in lines if line[0] == "m_dawa"]
    assert found == [("1", 53.87, None), ("5", 65.80, None), ("10", 68.90, None)]
    assert len(lines) == 9 + 1


def test_every_table_is_an_experiment_and_its_rows_are_words():
    assert {name.replace(".", "/") for name in NAMES} <= set(EXPERIMENTS)
    assert {name for name in EXPERIMENTS if "/table" in name} == {name.replace(".", "/") for name in NAMES}
    overrides: set[str] = set()
    for name in NAMES:
        cells = read_table(name)
        assert len({(*cell.settings.items(), cell.encoder_kind, cell.results) for cell in cells}) == len(cells)
        overrides |= {f"{key}={value}" for cell in cells for key, value in (cell.settings | cell.others).items()}
        assert all(0 < cell.value < 100 for cell in cells)
    check_saved_overrides(overrides)


def matched(folder: Path, table: str, *overrides: str) -> list[Differences]:
    """Return the differences of each line of a table that has the run of a command."""
    job(folder, f"experiment={table.replace('.', '/')}", *overrides)
    return [line.differs for line in match_runs(table, find_runs([folder]))[0] if line.runs]


def test_fedu_table3_is_of_mini_imagenet(tmp_path):
    """CIFAR-10 and CIFAR-100; the paper's clients have 100 / K = 20 classes (section 4.1)."""
    assert matched(tmp_path / "own", "fedu.table3", "strategy=fedu") == [{}, {}]
    assert matched(tmp_path / "other", "fedu.table3", "strategy=fedu", "dataset=tiny_imagenet") == []


@pytest.mark.parametrize(
    "overrides",
    [
        "method=original/fedx augmentation=fedx optimizer.lr=0.01",
        "method=orchestra augmentation=orchestra optimizer.lr=0.003",
        "method=fedu2/byol optimizer.lr=0.032",
    ],
)
def test_settings_that_no_paper_states_are_no_difference(tmp_path, overrides):
    """In three columns of FedU2's Table 1 each. Another learning rate is one, other views are another row."""
    baseline = ["dataset=cifar10", "num_clients=10", "strategy=fedavg", "regularizer=none", *overrides.split()]
    assert matched(tmp_path / "own", "fedu2.table1", *baseline) == [{}] * 3
    other = [*baseline[:-1], "optimizer.lr=0.5"]
    differs = {"optimizer.lr": ("0.5", overrides.rpartition("=")[2])}
    assert matched(tmp_path / "rate", "fedu2.table1", *other) == [differs] * 3
    assert matched(tmp_path / "views", "fedu2.table1", *baseline, "augmentation=simclr") == []


# Commands in the head of a table's file that are no row of it: federated averaging and other methods beside those of
# Dec-SSL's Table 2, which has no Per-SSL for IID clients, and a row whose training is not known.
NO_ROW = {
    "dec_ssl.table2": {
        "partition.beta=1 strategy=per_ssl",
        *(
            f"partition.beta={beta} {words}"
            for beta in (1, 0)
            for words in (
                "strategy=fedavg",
                "strategy=fedema method=fedu/byol",
                "strategy=fedu method=fedu/byol",
                "strategy=per_ssl method=dec_ssl/simsiam optimizer=sgd optimizer.weight_decay=5e-4",
            )
        ),
    },
    "lw_fedssl.table4": {"num_clients=1 dataset=cifar10 dataset.limit=5000"},
}


@pytest.mark.parametrize("name", some(NAMES, default=("lw_fedssl.table4",)))
def test_the_commands_of_a_table_are_its_rows(tmp_path, name):
    folders = {}
    for overrides in commands(head(name.replace(".", "/"))):
        for words in jobs([word for word in overrides if not word.startswith("seed=")], all_values=True):
            folders.setdefault(" ".join(words), job(tmp_path / str(len(folders)), *words))
    lines, others = match_runs(name, find_runs([tmp_path]))
    without = {words.partition(" ")[2] for words, folder in folders.items() if str(folder) in others}
    assert without == NO_ROW.get(name, set())
    assert all(line.differs == {} for line in lines), [line.differs for line in lines if line.differs]
    for overrides in {frozenset(line.number.settings.items()) for line in lines if not line.runs}:  # others composed
        settings = {"experiment": name.replace(".", "/"), **dict(overrides)}
        config, choices = resolve_config([f"{key}={value}" for key, value in settings.items()])
        assert all(choices[key] == value for key, value in settings.items() if key in choices)
        assert config.num_clients == int(settings.get("num_clients", config.num_clients))
