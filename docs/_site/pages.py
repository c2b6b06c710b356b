"""Pages that mkdocs makes besides those in docs/: the README, every choice of every group of settings, every module."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PACKAGES = ("fedssl", "strategies", "client_app", "server_app", "simulation")
GUIDE = ("train.md", "sweep.md", "data.md", "evaluate.md", "devices.md", "extend.md")  # by task
GROUPS = {  # what a choice is called, in the order of the site
    "strategy": "Strategies",
    "method": "Methods",
    "regularizer": "Regularisers",
    "partition": "Partitions",
    "evaluation": "Protocols of evaluation",
    "schedule": "Schedules",
    "encoder": "Encoders",
    "augmentation": "Augmentations",
    "dataset": "Data sets",
    "optimizer": "Optimisers",
    "lr_schedule": "Schedules of the learning rate",
    "server_optimizer": "Optimisers of the server",
    "calibration": "Calibration",
    "privacy": "Differential privacy",
    "secure": "Secure aggregation",
    "engine": "Engines",
    "tracker": "Trackers",
    "experiment": "Experiments",
}
_ONCE = "skip_local_inventory: true"  # what has a page among the modules already
_SETTING = re.compile(r"^( *)([a-z]\w*):(?: +(.*?))?(?: +# (.*))?$")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", flags=re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


class Setting(NamedTuple):
    """A setting of a choice, with its default and its comment."""

    key: str
    default: str
    comment: str


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    pages = {"index.md": readme(), **dict(setting_pages()), **dict(module_pages())}
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Links of texts to what is no page of the site become plain text."""
    if "/" in page.file.src_uri:  # made here
        return markdown
    return _LINK.sub(lambda found: found[0] if _stays(found[2]) else found[1], markdown)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    pages = sorted(file.name for file in (ROOT / "docs").glob("*.md"))
    config.nav = [
        {"fedssl": "index.md"},
        {"Guide": list(GUIDE)},
        {"Pages": [name for name in pages if name not in GUIDE]},
        {"Settings": [{title: f"settings/{group}.md"} for group, title in GROUPS.items()]},
        {"Modules": [f"modules/{package}.md" for package in PACKAGES]},
    ]
    return config


def readme() -> str:
    """The README, whose links lead to the pages of the site."""
    text = (ROOT / "README.md").read_text()
    return _LINK.sub(lambda found: f"[{found[1]}]({found[2].removeprefix('docs/')})", text)


def setting_pages() -> Iterator[tuple[str, str]]:
    """A page for every group of settings, which lists its choices, and one for each of these."""
    for group, title in GROUPS.items():
        files = sorted((CONF / group).rglob("*.yaml"))
        rows = []
        for file in files:
            name = file.relative_to(CONF / group).with_suffix("").as_posix()
            text = file.read_text()
            yield f"settings/{group}/{name}.md", choice(group, name, text)
            first = re.split(r"(?<=\.)\s+(?=[A-Z])", head(text), maxsplit=1)[0]
            rows.append(f"| [`{name}`]({group}/{name}.md) | {_cell(first)} |")
        table = "\n".join(["| choice | |", "|---|---|", *rows])
        yield f"settings/{group}.md", f"# {title}\n\n`fedssl {group}=CHOICE` takes one of these.\n\n{table}\n"


def choice(group: str, name: str, text: str) -> str:
    """The page of a choice: what its file says of it, equations, settings, and the docstring of what it makes."""
    up = "../" * (2 + name.count("/"))  # from this page to those of docs/
    lines = [
        f"# `{group}={name}`",
        "",
        *(_linked(line, up) for line in head_lines(text)),
        "",
        "```",
        f"fedssl {group}={name}",
        "```",
        "",
    ]
    file = equations(group, name)
    if file is not None:
        lines += ["## Equations", "", with_mathml(file.read_text())]
    found = list(settings(text))
    if found:
        lines += ["## Settings", "", "| setting | default | |", "|---|---|---|"]
        lines += [f"| `{one.key}` | {_code(one.default)} | {_linked(_cell(one.comment), up)} |" for one in found]
        lines.append("")
    target = re.search(r"^_target_: ([\w.]+)$", text, flags=re.MULTILINE)
    if target and target[1].split(".")[0] in PACKAGES:
        module = target[1].rpartition(".")[0]
        if (ROOT / f"{module.replace('.', '/')}.py").exists():
            lines += [
                f"::: {module}",
                "    options: {members: false, show_root_heading: false, skip_local_inventory: true}",
                "",
            ]
        lines += [f"::: {target[1]}", "    options: {skip_local_inventory: true}", ""]
    return "\n".join(lines)


def equations(group: str, name: str) -> Path | None:
    """The equations of a choice: its own, or those of another whose name the end of its own begins with."""
    folder, last = Path(__file__).parent / "equations" / group, name.rpartition("/")[2]
    names = [name, *("_".join(last.split("_")[:count]) for count in range(last.count("_") + 1, 0, -1))]
    return next((file for one in names if (file := folder / f"{one}.md").is_file()), None)


def with_mathml(text: str) -> str:
    """The text with its formulas, LaTeX between dollars, as browsers show them without any script."""

    def shown(found: re.Match[str]) -> str:
        block = found[1] is not None
        formula = convert(found[1] or found[2], display="block" if block else "inline").replace("|", "&#124;")
        # Markdown takes a line that begins with <math for a block.
        return f"\n<div>{formula}</div>\n" if block else f"<span>{formula}</span>"

    pieces = re.split(r"(```.*?```|`[^`]*`)", text, flags=re.DOTALL)  # code has dollars of its own
    return "".join(piece if piece.startswith("`") else _FORMULA.sub(shown, piece) for piece in pieces)


def head_lines(text: str) -> list[str]:
    """The comment that a file begins with, a command in it as code."""
    said = [line.removeprefix("#").strip() for line in text.split("\n", 200) if line.startswith("#")]
    count = next((place for place, line in enumerate(text.splitlines()) if not line.startswith("#")), len(said))
    lines = [line for line in said[:count] if not line.startswith("@package")]
    return [f"\n```\n{line}\n```\n" if line.startswith("fedssl") else _plain(line) for line in lines]


def head(text: str) -> str:
    """The comment that a file begins with, on one line."""
    return " ".join(line for line in head_lines(text) if not line.startswith("\n```"))


def settings(text: str) -> Iterator[Setting]:
    """The settings of a file, with dotted keys; comments stand behind a setting or above it, not on top."""
    above: list[tuple[int, str]] = []
    said: list[str] = []
    for line in itertools.dropwhile(lambda line: line.startswith("#"), text.splitlines()):
        if line.lstrip().startswith("#"):
            said.append(line.lstrip("# "))
            continue
        comment, said = " ".join(said), []
        found = _SETTING.match(line)
        if found is None or found[2] == "defaults":
            continue
        indent = len(found[1])
        above = [(before, key) for before, key in above if before < indent]
        key = ".".join([*(key for _, key in above), found[2]])
        above.append((indent, found[2]))
        if found[3] or found[4]:
            yield Setting(key, found[3] or "", " ".join(filter(None, (comment, found[4]))))


def module_pages() -> Iterator[tuple[str, str]]:
    """A page for every package, and one for each of its modules."""
    for package in PACKAGES:
        rows = []
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if parts[-1] != "__init__":
                yield f"modules/{name}.md", f"# `{name}`\n\n::: {name}\n    options: {{show_root_heading: false}}\n"
                rows.append(f"- [`{name}`]({name}.md)")
        yield f"modules/{package}.md", "\n".join([f"# `{package}`", "", *rows, ""])


def _stays(link: str) -> bool:
    inside = not link.startswith("..") and (ROOT / "docs" / link.partition("#")[0]).is_file()
    return inside or link.startswith(("http", "#"))


def _plain(text: str) -> str:
    """Text of a comment, in which Markdown has no meaning."""
    return re.sub(r"([*_|\[\]`])", r"\\\1", text.replace("<", "&lt;").replace(">", "&gt;"))


def _linked(text: str, up: str) -> str:
    """Text in which Markdown has no meaning, with links to the pages of docs/ that it names."""
    return re.sub(r"\bdocs/((?:\w|\\_)+\.md)\b", lambda page: f"[{page[1]}]({up}{page[1].replace(chr(92), '')})", text)


def _cell(text: str) -> str:
    return text if "\\" in text else _plain(text)


def _code(text: str) -> str:
    return f"`{text.replace('|', '/')}`" if text else ""
