"""The command ``fedssl``: its settings, and runs to resume."""

import pytest
from omegaconf import OmegaConf

from fedssl.config import load
from fedssl.errors import InputError
from simulation.cli import run
from tests.devices import write_images

QUICK = ["num_clients=3", "local_epochs=1", "dataset.limit=60", "encoder.width=4", "threads=1"]
QUICK += ["evaluate_every=0", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]


def test_only_a_run_without_phases_can_change_its_length(tmp_path):
    """The phase of a round depends on the number of rounds."""
    for name, schedule in (("staged", "layer_wise"), ("whole", "end_to_end")):
        run([*QUICK, "rounds=4", f"schedule={schedule}", f"output_dir={tmp_path / name}"])
    with pytest.raises(InputError, match=r"was run with rounds=4 \(now 5\); keep the number") as caught:
        run([f"resume={tmp_path / 'staged'}", "rounds=5"])
    assert "\n" not in str(caught.value)
    run([f"resume={tmp_path / 'whole'}", "rounds=5"])


def test_settings_are_composed_once_and_saved_once(tmp_path, monkeypatch):
    """The server in this process gets the settings of the command; a folder without labels changes its partition."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", 12)
    composed, resolve = [], load.resolve_config
    monkeypatch.setattr(load, "resolve_config", lambda overrides: composed.append(overrides) or resolve(overrides))
    data = ["dataset=image_folder", "dataset.path=images", "dataset.channels=3", "dataset.size=8"]
    data += ["dataset.splits.train=null", "dataset.splits.test=null", "dataset.mean=[0,0,0]", "dataset.std=[1,1,1]"]
    run([*QUICK[:2], *QUICK[3:], "rounds=1", *data])
    assert len(composed) == 1
    (folder,) = (tmp_path / "runs").iterdir()
    config, overrides = OmegaConf.load(folder / "config.yaml"), OmegaConf.load(folder / "overrides.yaml")
    assert config.output_dir == str(folder)
    assert config.partition == {"_target_": "fedssl.partition.iid"}
    assert config.dataset.path == str(tmp_path / "images")
    assert {f"dataset.path='{tmp_path / 'images'}'", "partition=iid"} <= set(overrides)
    assert "dataset.path=images" not in overrides
    assert OmegaConf.load(folder / "choices.yaml").partition == "iid"
