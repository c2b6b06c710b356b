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


def test_a_pickle_is_not_loaded():
    with pytest.raises(InputError, match="loads a pickle"):
        split_arguments(["--experimental-rerun", "config.pickle"])
