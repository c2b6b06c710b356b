"""Generated lists of overrides end in valid components or in one sentence."""

import random
import re

import pytest

from fedssl.config.compose import compose_config
from fedssl.config.constraint import Constraint
from fedssl.config.constraint_table import CONSTRAINTS
from fedssl.config.constraints import constraints_in
from fedssl.config.load import compose
from fedssl.config.overrides import check_single, config_groups
from fedssl.config.targets import installed_targets
from fedssl.errors import InputError
from server_app.build import build_components
from simulation.grid import simulated_clients

SEED = 20261125
# Groups whose choices read no other data set, and train nothing before the first round.
GROUPS = sorted(
    config_groups().keys() - {"dataset", "experiment", "engine", "tracker", "final_evaluation", "evaluation"}
)
SMALL = ["num_clients=3", "dataset.limit=60", "engine=local", "encoder.width=4", "final_evaluation=none", "rounds=2"]
WRONG = [
    "null",
    "''",
    "[]",
    "[1,2]",
    "{a:1}",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e308",
    "1e-320",
    "99999999999999999999",
]
WRONG += ["true", "word", "a:b", "1.5", "'1'", "[nan]", "${nothing}", "${seed}", "0x10", "1_0", "é"]


def values_for(constraint: Constraint, draw: random.Random) -> str:
    """Draw a value at a bound, inside the range, or of another type."""
    inside = [str(choice).lower() for choice in constraint.choices]
    if not inside and constraint.kind is bool:
        inside = ["true", "false"]
    for bound in (constraint.minimum, constraint.above, constraint.below, constraint.maximum):
        if not inside and abs(bound) < 1e6:
            at = int(bound) if constraint.kind is int else bound
            step = 1 if constraint.kind is int else 0.25
            inside += [str(at), str(at + step), str(at - step)]
    inside = inside or ["1", "3"]
    value = draw.choice(inside if draw.random() < 0.6 else WRONG)
    return f"[{value}]" if constraint.is_list and draw.random() < 0.7 and value in inside else value


def generate(number: int) -> list[str]:
    """Return a list of overrides: choices of groups, and values of settings that these have."""
    draw = random.Random(f"{SEED} {number}")
    groups = config_groups()
    chosen = [f"{group}={draw.choice(groups[group])}" for group in draw.sample(GROUPS, draw.randrange(4))]
    if any(override.startswith("partition=") for override in chosen):
        chosen += ["partition.file=/nonexistent.csv"] if "partition=file" in chosen else []
    config, _ = compose_config(chosen)
    found = [(key, constraint) for key, _, constraint in constraints_in(config, installed=installed_targets())]
    others = [(f"{group}.{name}".lstrip("."), c) for group, names in CONSTRAINTS.items() for name, c in names.items()]
    values = []
    for _ in range(draw.randrange(1, 4)):
        key, constraint = draw.choice(found if draw.random() < 0.9 else others)
        values.append(f"{key}={values_for(constraint, draw)}")
    draw.shuffle(values)
    return [*chosen, *values]


def outcome(overrides: list[str]) -> str:
    """Return the sentence that rejects the overrides; empty if they are valid."""
    try:
        build_components(compose([*SMALL, *overrides]), simulated_clients(2))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "numbers",
    [
        range(30),  # one of ten lists is valid
        *(pytest.param(range(n, n + 47), marks=pytest.mark.heavy) for n in range(30, 500, 47)),
    ],
    ids=str,
)
def test_success_or_one_sentence(numbers: range) -> None:
    sentences = {}
    for number in numbers:
        overrides = generate(number)
        print(f"seed {SEED}, list {number}: fedssl {' '.join(overrides)}")
        sentences[number] = outcome(overrides)
        assert "\n" not in sentences[number]
        assert len(sentences[number]) < 600
    valid = sum(not sentence for sentence in sentences.values())
    assert 0 < valid < len(sentences), "the generator draws valid and invalid lists"


@pytest.mark.parametrize(
    ("override", "end"),
    [
        ("optimizer.lr=0,01", "add -m to run each, or write a decimal point: optimizer.lr=0.01"),
        ("dataset.mean=1,2", "add -m to run each, or write dataset.mean=[1,2] for a list"),
        ("strategy=fedavg,fedprox", "add -m to run each"),
    ],
)
def test_several_values_of_a_single_run(override: str, end: str) -> None:
    with pytest.raises(InputError, match=f"{re.escape(end)}$"):
        check_single([override])
