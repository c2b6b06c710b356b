"""Parsing and applying overrides."""

import pytest
from hydra.core.override_parser.types import OverrideType
from omegaconf import OmegaConf

from fedssl.config.hydra_internals import apply_overrides, parse_overrides, split_arguments
from fedssl.errors import InputError


def test_a_changed_override_does_not_change_the_next():
    first, again = (parse_overrides(["x.0.y=[1,{z: 2}]"])[0] for _ in range(2))
    config = OmegaConf.create({"x": [{}]})
    apply_overrides([first], config)
    first.value()[1]["z"] = config.x[0].y[1].z = 3
    assert first.type == OverrideType.FORCE_ADD
    assert again.type == OverrideType.CHANGE
    assert again.value() == parse_overrides(["x.0.y=[1,{z: 2}]"])[0].value() == [1, {"z": 2}]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--experimental-rerun", "config.pickle"], "loads a pickle"),
        (["--rounds", "5"], "unrecognized arguments: --rounds; settings have no dashes: rounds=5;"),
        (["--config-name", "mine"], "--config-name and --config-path are not supported; .*add --config-dir FOLDER"),
        (["-cp", "/mine", "rounds=5"], "--config-name and --config-path are not supported"),
        (["-m", "seed=0,1", "--info"], "^--info and --multirun exclude each other; remove one of them"),
        (["-i", "--cfg", "job"], "^--cfg and --info exclude each other"),
        (["--help", "-m"], "^--help and --multirun exclude each other"),
        (["-r", "-m"], "^--run and --multirun exclude each other"),
        (["-p", "optimizer"], "^--package and --resolve belong to --cfg; add --cfg job"),
        (["-sc", "query=bash"], "^--shell-completion is not supported"),
    ],
)
def test_other_flags_are_refused(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        split_arguments(arguments)


def test_the_default_of_hydra_is_no_flag():
    assert split_arguments(["--run", "rounds=5"]) == ([], ["rounds=5"])
    assert split_arguments(["-c", "job", "rounds=5", "--resolve"]) == (["-c", "job", "--resolve"], ["rounds=5"])
