"""The page of the papers: every command is made of words that exist."""

import re
import shlex

import pytest

from fedssl.config.compose import validate_names
from fedssl.config.load import compose
from fedssl.config.overrides import CONF
from tests.experiments.every import EXPERIMENTS, check_saved_overrides, commands, head, jobs

PAGE = (CONF.parent / "docs" / "papers.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"`(fedssl .*?)`", PAGE)]


def overrides_of(command):
    return [override for override in command[1:] if override != "-m"]


IN_HEADS = [overrides for name in EXPERIMENTS for overrides in commands(head(name))]  # composed in test_every.py
OWN = [overrides for overrides in map(overrides_of, COMMANDS) if overrides not in IN_HEADS]


def test_choices_and_keys_exist():
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        check_saved_overrides(overrides_of(command))


@pytest.mark.heavy
@pytest.mark.parametrize("overrides", OWN, ids=" ".join)
def test_every_run_composes(overrides):
    validate_names(overrides)
    for job in jobs(overrides):
        compose(job)
