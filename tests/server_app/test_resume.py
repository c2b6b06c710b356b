"""A run that is resumed from a checkpoint ends with the bits and lines of an uninterrupted one.

`test_resume_parts` and `test_crash` have damaged and interrupted runs.
"""

from pathlib import Path

import pytest

from fedssl.datasets.base import forget_images
from fedssl.errors import InputError
from simulation.run import run
from tests.cases import some
from tests.devices import write_images
from tests.methods import overrides_of, save_teacher
from tests.resuming import repeat_from
from tests.runs import SMALL, UNTESTED, read_summary
from tests.test_digests import BASE, line_digests, model_digests, state_digests

HEAD = ["method.projector.hidden_dim=16", "method.projector.out_dim=8"]
CASES = {
    "fedu": ["strategy=fedu", "method=byol", "strategy.predictor_threshold=0.042"],
    "fedema": ["strategy=fedema", "method=byol"],
    "fedadam": ["strategy=fedavg", "server_optimizer=fedadam"],
    "fedavgm": ["strategy=fedavg", "server_optimizer=fedavgm"],
    "per_ssl": ["strategy=per_ssl", "method=byol"],
    "scaffold": ["strategy=scaffold", "clients_per_round=2", "model_average=last", "model_average.rounds=2"],
    "feddyn": ["strategy=feddyn", "clients_per_round=2", "model_average=ema"],
    "moon": ["strategy=moon", "clients_per_round=2", "optimizer=sam"],
    "fednova": ["strategy=fednova", "clients_per_round=2", "server_optimizer=fedadagrad"],
    "fedexp": ["strategy=fedexp", "model_average=last", "model_average.rounds=2"],
    "mar": [*overrides_of("mar"), "strategy=fedavg", "clients_per_round=2"],
    "fedsc": ["method=fedsc", *HEAD, "strategy=fedavg", "clients_per_round=2"],
    "ssd": ["method=ssd", "method.hidden_dim=16", "strategy=fedavg"],
    "featarc": ["strategy=featarc", "method=byol", "strategy.num_images=16"],
    "featarc at the server": ["strategy=featarc", "strategy.num_images=16", "strategy.assign_at=server"],
    "clustered by loss": ["strategy=clustered", "strategy.num_images=16", "strategy.assign_by=loss"],
    "calibrated stages": ["schedule=layer_wise", "rounds=5", "regularizer=alignment", "calibration=auxiliary"],
    "progressive euc": ["schedule=progressive", "rounds=5", "strategy=euc"],
    "fedca": ["method=fedca", "method.alignment_weight=0.5", "method.sent_per_round=3", *HEAD, "strategy=fedavg"],
    "orchestra": ["method=orchestra", "method.queue_size=32", "strategy=fedavg", "clients_per_round=2"],
    "swav": ["method=swav", *HEAD, "method.queue_size=8", "method.queue_start_round=2", "clients_per_round=2"],
}
DEFAULT = ("fedu", "featarc", "calibrated stages", "fedca")


@pytest.mark.parametrize("name", some(CASES, default=DEFAULT))
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    overrides = [*BASE, "rounds=3", "keep_checkpoints=4", *CASES[name]]
    if name == "fedca":
        overrides.append(f"teacher={save_teacher(tmp_path / 'encoder.pt', 'encoder.width=4', 'seed=7')}")
    whole = tmp_path / "whole"
    run([*overrides, f"output_dir={whole}"])
    again = repeat_from(2, whole)
    for digests in (model_digests, state_digests, line_digests):
        assert digests(again) == digests(whole)


def test_images_may_move_before_a_run_is_resumed(tmp_path: Path) -> None:
    """Without labels `partition.csv` is the same for other images, so a digest of the files decides."""
    settings = [*SMALL, *UNTESTED, "dataset=folder", "dataset.size=8", "dataset.splits.test=null", "rounds=2"]
    images, whole = write_images(tmp_path / "images", 24), tmp_path / "whole"
    run([*settings, f"dataset.path={images}", "keep_checkpoints=3", f"output_dir={whole}"])
    moved = images.rename(tmp_path / "moved")
    forget_images()  # as a new process
    again = repeat_from(1, whole, f"dataset.path={moved}")
    assert model_digests(again) == model_digests(whole)
    first, other = (moved / "00.png").read_bytes(), (moved / "01.png").read_bytes()
    assert (len(first), first == other) == (len(other), False)
    for name, content in (("other.png", first), ("00.png", other)):
        (moved / "00.png").unlink()
        (moved / name).write_bytes(content)
        forget_images()
        with pytest.raises(InputError, match=r"the clients' images are in 24 files.*; restore the files, or start a "):
            run([f"resume={again}", "rounds=3"])
        (moved / name).rename(moved / "00.png")


@pytest.mark.parametrize(
    ("overrides", "follows"),
    [
        ([], False),
        (["lr_schedule=cosine"], True),
        (["method=fedsc", *HEAD], True),
        (["method=byol"], False),
    ],
)
def test_rounds_that_follow_an_earlier_end_are_recorded(overrides, follows, tmp_path, capfd):
    folder = tmp_path / "run"
    run([*BASE, "rounds=2", *overrides, f"output_dir={folder}"])
    run([f"resume={folder}", "rounds=3"])
    run([f"resume={folder}", "rounds=4"])
    lines = [line for line in read_summary(folder)["recoveries"] if "results differ from those" in line]
    expected = [
        f"rounds 1 to {done} were those of rounds={done}, on which the learning rate or the method depends: results "
        f"differ from those of a run with rounds={done + 1} from the start"
        for done in (2, 3)
    ]
    assert lines == (expected if follows else [])
    printed = " ".join("".join(capfd.readouterr()).split())
    assert all(line in printed for line in lines)
