"""Types and ranges of settings."""

import importlib.util
import math

import pytest
from omegaconf import OmegaConf

from fedssl.config.compose import compose_config
from fedssl.config.constraints import CONSTRAINTS, Constraint, check_arguments, constraints_in, find_constraint
from fedssl.config.load import compose
from fedssl.config.overrides import CONF, config_groups
from fedssl.config.targets import installed_targets
from fedssl.errors import InputError
from fedssl.methods.barlow_twins import LOSSES as BARLOW_LOSSES
from fedssl.methods.simclr import LOSSES as SIMCLR_LOSSES
from strategies.clustered import UNWEIGHTED_RULES, WEIGHTED_RULES
from strategies.topology import TOPOLOGIES
from strategies.weighted_sum import REQUIRED_METRICS

FREE = {"evaluation.name", "dataset.label", "dataset.image"}  # strings


@pytest.mark.parametrize(
    ("constraint", "allowed", "rejected", "text"),
    [
        (
            Constraint(kind=int, minimum=1, maximum=4),
            [1, 4],
            [0, 5, 1.0, True, None, "2", [1]],
            "an integer from 1 to 4",
        ),
        (
            Constraint(above=0, below=1, optional=True),
            [None, 0.5, 1e-300],
            [0, 1, math.nan, math.inf, -math.inf, False, "x"],
            "a number above 0 and below 1, or null",
        ),
        (Constraint(), [-1e308, 0, 3], [math.nan, math.inf, True, None], "a number"),
        (Constraint(kind=bool), [True, False], [0, 1, None, "true"], "true or false"),
        (Constraint(choices=("a", 1)), ["a", 1], ["b", True, 1.0, None], "a or 1"),
        (
            Constraint(minimum=0, is_list=True),
            [[], [0, 2.5], (1,)],
            [[-1], [[1]], 1, None, ["x"], {"a": 1}],
            "a list of numbers of at least 0",
        ),
    ],
)
def test_values_and_text(constraint: Constraint, allowed: list, rejected: list, text: str) -> None:
    assert str(constraint) == text
    assert [value for value in allowed if not constraint.allows(value)] == []
    assert [value for value in rejected if constraint.allows(value)] == []


def test_a_technical_limit_is_stated_where_it_is_exceeded() -> None:
    with pytest.raises(InputError, match=r"^method.hidden_dim=0 must be an integer of at least 1$"):
        check_arguments("method", hidden_dim=0)
    with pytest.raises(InputError, match=r"^method.hidden_dim=100000000 must be at most 1,048,576$"):
        check_arguments("method", hidden_dim=10**8)


def choices_of(group: str) -> list[str]:
    return [name for name in config_groups()[group] if group not in ("experiment", "final_evaluation")]


CHOICES = [(group, name) for group in sorted(config_groups()) for name in choices_of(group)]


@pytest.fixture(scope="module")
def leaves() -> dict[str, object]:
    """All values of ``conf/``, of every choice, by key."""
    found: dict[str, object] = {}

    def add(node: object, key: str) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                if not str(name).startswith("_") and name not in ("defaults", "hydra", "views", "view"):
                    add(value, f"{key}.{name}".lstrip("."))
        else:
            found[key] = node

    for file in CONF.rglob("*.yaml"):
        group = file.relative_to(CONF).parts[0] if file.parent != CONF else ""
        if group not in ("experiment", "final_evaluation"):
            node = OmegaConf.to_container(OmegaConf.load(file))
            outer = {key: node.pop(key) for key in ("engine", "aggregation") if group == "engine" and key in node}
            add(node, group)
            add(outer, "")
    return found


def test_every_number_and_every_boolean_has_a_constraint(leaves: dict[str, object]) -> None:
    without = set()
    for key, value in leaves.items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, int | float) for number in numbers):
            group, _, name = key.rpartition(".")
            if not any(find_constraint(group.split(".")[0], name, owner=owner) for owner in ("", "SimCLR")):
                without.add(key)
    assert without == set()


def test_every_constraint_is_that_of_a_setting(leaves: dict[str, object]) -> None:
    names = {(key.split(".")[0] if "." in key else "", key.rpartition(".")[2]) for key in leaves}
    classes = CONSTRAINTS.keys() - {group for group, _ in names}  # and functions, such as tuning's adapter
    unused = {
        f"{group}.{name}"
        for group, settings in CONSTRAINTS.items()
        for name in settings
        if group not in classes and (group, name) not in names
    }
    # Those of all optimizers are allowed in the evaluations' optimizers too, and nesterov in the run's.
    assert unused == {"optimizer.nesterov", "evaluation.fused"}
    targets = {target.rpartition(".")[2] for target in installed_targets()}
    assert classes <= targets


@pytest.mark.parametrize(("group", "name"), [choice for choice in CHOICES if "/" not in choice[1]])
def test_defaults_are_valid(group: str, name: str) -> None:
    config, _ = compose_config([f"{group}={name}"])
    found = {key: (value, c) for key, value, c in constraints_in(config, installed=installed_targets())}
    plain = {key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, (v, _) in found.items()}
    assert {key: value for key, value in plain.items() if not found[key][1].allows(value)} == {}
    assert {"seed", "optimizer.lr", "aggregation.min_updates", "dataset.size"} <= found.keys()


def test_choices_are_those_of_the_code() -> None:
    assert CONSTRAINTS["SimCLR"]["loss"].choices == tuple(SIMCLR_LOSSES)
    assert CONSTRAINTS["BarlowTwins"]["loss"].choices == tuple(BARLOW_LOSSES)
    assert CONSTRAINTS["strategy"]["rule"].choices == (*WEIGHTED_RULES, *UNWEIGHTED_RULES)
    assert CONSTRAINTS["strategy"]["topology"].choices == TOPOLOGIES
    assert set(CONSTRAINTS["LDAWA"]["weighting"].choices) == set(REQUIRED_METRICS)


def test_nested_settings_have_the_constraint_of_their_group() -> None:
    overrides = [
        "evaluation=transfer",
        "+dataset@evaluation.datasets.other=cifar10",
        "evaluation.datasets.other.size=0",
    ]
    with pytest.raises(InputError, match=r"^evaluation.datasets.other.size=0 must be an integer from 1 to 4096; the"):
        compose(overrides)
    with pytest.raises(InputError, match=r"^final_evaluation.protocols.knn.k=0 must be an integer of at least 1; the"):
        compose(["final_evaluation.protocols.knn.k=0"])
    with pytest.raises(InputError, match=r"calibration.dataset.channels=2 must be 1 or 3"):
        compose(["calibration=auxiliary", "+dataset@calibration.dataset=cifar10", "calibration.dataset.channels=2"])


def test_arguments_of_the_users_classes_are_not_constrained() -> None:
    node = OmegaConf.create({"strategy": {"_target_": "mine.Strategy", "weight": -1, "inner": {"weight": -1}}})
    assert list(constraints_in(node, installed=installed_targets())) == []


def test_the_reference_page_is_up_to_date() -> None:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("settings_page", CONF.parent / "docs/_site/settings_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: uv run python docs/_site/settings_page.py"
