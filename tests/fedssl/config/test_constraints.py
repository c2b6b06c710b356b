"""Types and ranges of settings."""

import importlib
import re
from collections.abc import Mapping

import pytest
from omegaconf import OmegaConf

from fedssl.config.constraint import Constraint
from fedssl.config.constraint_table import CONSTRAINTS
from fedssl.config.constraints import check_arguments, constraint_of, group_of
from fedssl.config.load import compose
from fedssl.config.overrides import CONF
from fedssl.config.targets import installed_targets
from fedssl.errors import InputError
from fedssl.methods.barlow_twins import LOSSES as BARLOW_LOSSES
from fedssl.methods.simclr import LOSSES as SIMCLR_LOSSES
from strategies.clustered import UNWEIGHTED_RULES, WEIGHTED_RULES
from strategies.topology import TOPOLOGIES
from strategies.weighted_sum import REQUIRED_METRICS


@pytest.fixture(scope="module")
def leaves() -> dict[str, object]:
    """All values of ``conf/``, of every choice, by key."""
    found: dict[str, object] = {}

    def add(node: object, key: str) -> None:
        if isinstance(node, dict) and node:
            for name, value in node.items():
                if not (str(name).startswith("_") or name in ("defaults", "hydra")):
                    add(value, f"{key}.{name}".lstrip("."))
        elif isinstance(node, list) and node and isinstance(node[0], dict):
            for index, item in enumerate(node):
                add(item, f"{key}.{index}")
        else:
            found[key] = node

    for file in CONF.rglob("*.yaml"):
        text = file.read_text()
        is_outer = file.parent == CONF or "# @package _global_" in text
        add(OmegaConf.to_container(OmegaConf.load(file)), "" if is_outer else file.relative_to(CONF).parts[0])
    return found


def own_ranges() -> set[str]:
    """Return the settings whose ranges are those of the modules of their classes."""
    found: set[str] = set()
    for file in CONF.rglob("*.yaml"):
        for target in re.findall(r"^_target_: (\w+(?:\.\w+)+)\.\w+$", file.read_text(), flags=re.MULTILINE):
            if target.split(".")[0] in ("fedssl", "strategies"):
                found |= {f"{file.relative_to(CONF).parts[0]}.{name}" for name in ranges_of(target)}
    return found


def ranges_of(module: str) -> Mapping[str, Constraint]:
    return getattr(importlib.import_module(module), "RANGES", {})


def test_every_value_has_a_type_and_a_range(leaves: dict[str, object]) -> None:
    """Also those in lists and in nested mappings."""
    of_class = {"method.loss", *(f"strategy.{name}" for name in ("alpha", "epsilon", "temperature"))}
    of_mapping = {key for key in leaves if key.startswith("sweep.axes.")}  # any names
    unlisted = {key for key, value in leaves.items() if value != {} and constraint_of(key) is None}
    assert unlisted == of_class | of_mapping | own_ranges()
    assert {"augmentation.views.0.mask.ratio", "evaluation.view.hue", "dataset.splits.test"} < leaves.keys()
    assert not {str(constraint) for group in CONSTRAINTS.values() for constraint in group.values()} & {"a number"}


def test_a_module_may_have_the_ranges_of_its_own_settings() -> None:
    ranges = {"sharpness": Constraint(above=0, maximum=1)}
    check_arguments("method", ranges=ranges, sharpness=1.0, temperature=0.5)
    with pytest.raises(InputError, match=r"^method.sharpness=0 must be a number above 0 and at most 1$"):
        check_arguments("method", ranges=ranges, sharpness=0)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("augmentation.views.0.count=1000000000", r"views.0.count=1000000000 must be at most 1,024"),
        ("augmentation.views.1.brightness=inf", r"views.1.brightness=inf must be a finite number of at least 0"),
        ("augmentation.views.0.blur_prob=true", r"views.0.blur_prob=true must be a number from 0 to 1"),
        ("augmentation.views.0.blur_sigma=[0.1,inf]", r"blur_sigma=\[0.1, inf\] must be a list \[low, high\]"),
        ("augmentation.views=3", r"augmentation.views=3 must be a list of mappings"),
        ("augmentation.views=[3]", r"augmentation.views=\[3\] must be a list of mappings"),
        ("dataset.mean=[1e300]", r"mean=\[1e\+300\] must be a list of numbers from -100000"),
        ("schedule=layer_wise schedule.rounds_per_stage=[1,true]", r"skewed, or a list of integers of at least 1"),
        (
            "augmentation.views.7.count=2",
            r"there is no setting 'augmentation.views.7.count'; did you mean augmentation.views.0",
        ),
        (
            "strategy=fedavg lr_schedule.warmup_rounds=2",
            "no setting 'lr_schedule.warmup_rounds'; did you mean lr_schedule;",
        ),
        ("augmentation.views.0.rotate=2", r"there is no setting 'augmentation.views.0.rotate'"),
    ],
)
def test_values_inside_lists_and_mappings_are_checked(override: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        compose(override.split())


def test_a_class_has_ranges_of_its_own() -> None:
    """Other strategies require a weighting, and L-DAWA, for example, has no alpha."""
    assert compose(["strategy=clustered"]).algorithm.strategy.values["weighting"] is None
    with pytest.raises(InputError, match=r"strategy.alpha=0 must be a number above 0"):
        compose(["strategy=feddyn", "strategy.alpha=0"])


def test_settings_of_one_view_are_set_alone() -> None:
    """Also those that its file omits, and after a change of the whole list."""
    one = ["augmentation.views.0.count=2", "augmentation.views.1.solarize_prob=0.5", "augmentation.views.1.flip_prob=0"]
    views = compose(one).training.augmentation.values["views"]
    assert [view.get("count") for view in views] == [2, None]
    assert [view.get("solarize_prob") for view in views] == [None, 0.5]
    masked = compose(["encoder=vit_tiny", "augmentation=digits_mae", "augmentation.views.0.mask.ratio=0.5"])
    assert masked.training.augmentation.values["views"][0]["mask"]["ratio"] == 0.5


def test_every_constraint_is_that_of_a_setting(leaves: dict[str, object]) -> None:
    names = {(group_of(key.rpartition(".")[0]), key.rpartition(".")[2]) for key in leaves}
    classes = CONSTRAINTS.keys() - {group for group, _ in names}  # and functions, such as tuning's adapter
    used = {f"{group}.{name}" for group, name in names}
    listed = {f"{group}.{name}" for group, settings in CONSTRAINTS.items() for name in settings if group not in classes}
    unused = listed - used
    # Those of all optimizers are allowed in the evaluations' optimizers too, and nesterov in the run's.
    of_views = {"augmentation.views", "view.mask", "view.crop_ratio"}
    assert unused == {"optimizer.nesterov", "evaluation.fused", "evaluation.rho", *of_views}
    targets = {target.rpartition(".")[2] for target in installed_targets()}
    assert classes <= targets


def test_choices_are_those_of_the_code() -> None:
    assert CONSTRAINTS["SimCLR"]["loss"].choices == tuple(SIMCLR_LOSSES)
    assert CONSTRAINTS["BarlowTwins"]["loss"].choices == tuple(BARLOW_LOSSES)
    assert CONSTRAINTS["strategy"]["rule"].choices == (*WEIGHTED_RULES, *UNWEIGHTED_RULES)
    assert CONSTRAINTS["strategy"]["topology"].choices == TOPOLOGIES
    assert set(CONSTRAINTS["LDAWA"]["weighting"].choices) == set(REQUIRED_METRICS)
