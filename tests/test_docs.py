"""What the pages say can be done can be done: commands are accepted, choices exist, links lead somewhere."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedssl.config.compose import validate_names
from fedssl.config.overrides import CONF
from fedssl.config.renamed import RENAMED

ROOT = CONF.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
GROUPS = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
EXAMPLES = {"NAME", "FILE", "mine"}  # names that stand for any


def code_blocks(page: Path) -> Iterator[str]:
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.M | re.S):
        if language in ("", "bash"):
            yield block.replace("\\\n", "")


def commands(page: Path) -> list[str]:
    """The lines that call ``fedssl``, in blocks of code."""
    lines = (line for block in code_blocks(page) for line in block.splitlines())
    return [line.removeprefix("uv run ") for line in lines if re.match(r"(uv run )?fedssl( |$)", line)]


def inline_code(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", text)]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("command", sorted({command for page in PAGES for command in commands(page)}))
def test_commands_are_accepted(command):
    words = shlex.split(command, comments=True)[1:]
    validate_names([word for word in words if not word.startswith("-")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_choices_exist(page):
    for span in inline_code(page):
        for group, choices in re.findall(r"(?<![\w.@])(\w+)=([\w/|]+)", span):
            if group in GROUPS:
                known = {
                    file.relative_to(CONF / group).with_suffix("").as_posix()
                    for file in CONF.glob(f"{group}/**/*.yaml")
                }
                old = {word.partition("=")[2] for word in RENAMED if word.startswith(f"{group}=")}
                assert set(choices.split("|")) - EXAMPLES - old <= known, span


@pytest.mark.parametrize(
    ("page", "column"),
    [("README.md", "global model"), ("docs/strategies.md", "global model"), ("docs/strategies.md", "down")],
)
def test_tables_of_strategies_have_all_of_them_and_no_others(page, column):
    lines = (ROOT / page).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if re.match(rf"\| `?strategy=?`? \| {column} \|", line))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(file.stem for file in (CONF / "strategy").glob("*.yaml"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_equations_name_settings_that_there_are_and_have_a_command_that_is_accepted():
    """Of every file: its command takes its choice, and so do the settings that its symbols are tied to."""
    folder = ROOT / "docs" / "_site" / "equations"
    for file in folder.rglob("*.md"):
        group, _, name = file.relative_to(folder).with_suffix("").as_posix().partition("/")
        (command,) = commands(file)
        words = shlex.split(command)[1:]
        names = {word.removeprefix("final_") for word in words}
        assert f"{group}={name}" in names, file
        validate_names(words)
        keys = (re.fullmatch(r"(\w+)((?:\.\w+)+)(?:=.*)?", span) for span in inline_code(file))
        own = [key[2] for key in keys if key and key[1] == group and "json" not in key[2]]
        validate_names([f"{group}={name}", *(f"{group}{key}=0" for key in own)])


def test_the_first_page_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170
