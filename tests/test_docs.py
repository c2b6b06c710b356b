"""The pages are correct: commands are accepted, choices and settings exist, links have a target."""

import itertools
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from fedssl.config.compose import validate_names
from fedssl.config.overrides import CONF

ROOT = CONF.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"])
GROUPS = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
EXAMPLES = {"NAME", "FILE", "mine"}  # placeholders


def code_blocks(page: Path) -> Iterator[str]:
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.M | re.S):
        if language in ("", "bash"):
            yield block.replace("\\\n", "")


def commands(page: Path) -> list[str]:
    """Return the lines that call ``fedssl`` in blocks of code."""
    lines = (line for block in code_blocks(page) for line in block.splitlines())
    return [line.removeprefix("uv run ") for line in lines if re.match(r"(uv run )?fedssl( |$)", line)]


def inline_code(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", text)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def nested_keys(settings: object, prefix: str = "") -> Iterator[str]:
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield f"{prefix}{key}"
            yield from nested_keys(value, f"{prefix}{key}.")


@cache
def setting_keys() -> set[str]:
    """Return the dotted keys of all settings, of every choice."""
    keys = set(nested_keys(yaml.safe_load((CONF / "config.yaml").read_text())))
    for group in GROUPS - {"experiment"}:
        for file in (CONF / group).rglob("*.yaml"):
            text = file.read_text()
            keys |= set(nested_keys(yaml.safe_load(text), "" if "@package _global_" in text else f"{group}."))
    return keys | {f"final_{key}" for key in keys if key.startswith("evaluation.")}


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
                assert set(choices.split("|")) - EXAMPLES <= known, span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_exist(page):
    groups = "|".join([*GROUPS, "aggregation", "early_stopping"])
    named = {
        key for span in inline_code(page) for key in re.findall(rf"(?<![\w.@/])(?:{groups})(?:\.[a-z_]+)+(?==)", span)
    }
    bare = {span for span in inline_code(page) if re.fullmatch(rf"(?:{groups})(?:\.[a-z_]+)+", span)}
    files = {"encoder.pt", "encoder.onnx", "encoder.preprocess"}
    assert (named | bare) - files <= setting_keys()


def test_the_table_of_groups_names_existing_choices():
    lines = (ROOT / "README.md").read_text().splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[lines.index("| group | choices |") + 2 :])
    for row in rows:
        groups = re.findall(r"`(\w+)`", row.split("|")[1])
        files = {file.stem for group in groups for file in (CONF / group).glob("*.yaml")}
        assert groups
        assert set(re.findall(r"`(\w+)`(?!`)", row.split("|")[2].partition(":")[0])) - files <= {
            "timm",
            "torchvision",
        }, row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_have_a_target(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_pages_name_exist(page):
    files = {span for span in inline_code(page) if re.fullmatch(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|yaml|toml)", span)}
    missing = {file for file in files if not (ROOT / file).exists() and not (ROOT / "tests" / file).exists()}
    assert {file for file in missing if Path(file).stem != "mine"} == set()


def test_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_guide_stays_short():
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md")) <= 20_000
