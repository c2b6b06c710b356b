"""The index of the papers: every file that it names exists, and every command is made of words that there are."""

import re
import shlex

import pytest

from fedssl.config.compose import validate_names
from fedssl.config.load import compose
from fedssl.config.overrides import CONF
from tests.experiments.every import EXPERIMENTS, OF_PAPERS, check_saved_overrides, commands, head, jobs

PAGE = (CONF.parent / "docs" / "paper_index.md").read_text()
ROWS = [line.split("|")[1:] for line in PAGE.splitlines() if re.match(r"\| [A-Z].* \| .*\|", line)]
COMMANDS = [shlex.split(line) for line in re.findall(r"`(fedssl .*?)`", PAGE)]


def overrides_of(command):
    return [override for override in command[1:] if override != "-m"]


IN_HEADS = [overrides for name in EXPERIMENTS for overrides in commands(head(name))]  # composed in test_every.py
OWN = [overrides for overrides in map(overrides_of, COMMANDS) if overrides not in IN_HEADS]


def test_files_exist():
    paths = [path for row in ROWS for path in re.findall(r"`([\w./]+\.(?:py|yaml))`", row[1])]
    paths += re.findall(r"`python ([\w./]+\.py)`", PAGE)
    assert len(paths) > 45
    assert [path for path in paths if not (CONF.parent / path).is_file()] == []


def test_every_experiment_of_a_paper_is_in_it():
    named = {name for command in COMMANDS for name in re.findall(r"\w+/\w+", " ".join(command)) if name in EXPERIMENTS}
    assert {name for name in OF_PAPERS if name.split("/")[1] not in ("base", "fedmoco")} <= named


def test_choices_and_keys_exist():
    for command in COMMANDS:
        assert len(command) > 1
        check_saved_overrides(overrides_of(command))


@pytest.mark.heavy
@pytest.mark.parametrize("overrides", OWN, ids=" ".join)
def test_every_run_composes(overrides):
    validate_names(overrides)
    for job in jobs(overrides):
        compose(job)
