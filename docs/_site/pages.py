"""Pages that mkdocs generates besides those in docs/: the README, every choice of every config group, every module."""

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
GROUPS = {  # titles of the groups, in the order of the site
    "strategy": "Strategies",
    "method": "Methods",
    "regularizer": "Regularizers",
    "partition": "Partitions",
    "evaluation": "Evaluation protocols",
    "tuning": "Tuning",
    "schedule": "Schedules",
    "encoder": "Encoders",
    "augmentation": "Augmentations",
    "dataset": "Datasets",
    "optimizer": "Optimizers",
    "lr_schedule": "Learning-rate schedules",
    "server_optimizer": "Server optimizers",
    "calibration": "Calibration",
    "privacy": "Differential privacy",
    "secure_aggregation": "Secure aggregation",
    "availability": "Availability of clients",
    "client_speed": "Speed of clients",
    "engine": "Engines",
    "tracker": "Trackers",
    "experiment": "Experiments",
}
GUIDE = {  # sections of the site, and their pages by task
    "Guide": ("install", "train", "data", "pretrained", "sweep", "evaluate", "choosing", "settings", "extend", "faq"),
    "Devices and clusters": ("devices", "deployment", "cluster", "scale", "security"),
    "Algorithms": ("strategies", "objectives", "papers", "paper_index"),
    "Measurements": ("learning", "results", "l_dawa", "benchmarks"),
    "Development": ("architecture",),
}
_SETTING = re.compile(r"^( *)([a-z]\w*):(?: +(.*?))?(?: +# (.*))?$")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", flags=re.DOTALL)
_TABLE_ROW = re.compile(r"^\|.*$", flags=re.MULTILINE)
_CODE = re.compile(r"`[^`]+`")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


class Setting(NamedTuple):
    """Setting of a choice, with its default and its comment."""

    key: str
    default: str
    comment: str


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {"index.md": readme(), **dict(setting_pages()), **dict(module_pages())}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Replace links to files outside the site by plain text, and unescape code in tables."""
    if "/" in page.file.src_uri:  # generated
        return markdown
    markdown = _TABLE_ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    return _LINK.sub(lambda match: match[0] if _is_on_site(match[2]) else match[1], markdown)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = [
        {"fedssl": "index.md"},
        *({section: [f"{name}.md" for name in names]} for section, names in GUIDE.items()),
        {"Settings": [{title: f"settings/{group}.md"} for group, title in GROUPS.items()]},
        {"Modules": [f"modules/{package}.md" for package in PACKAGES]},
    ]
    return config


def readme() -> str:
    """Return the README with links to the pages of the site."""
    text = (ROOT / "README.md").read_text()
    return _LINK.sub(lambda match: f"[{match[1]}]({match[2].removeprefix('docs/')})", text)


def setting_pages() -> Iterator[tuple[str, str]]:
    """Yield a page for every config group, which lists its choices, and a page for every choice."""
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
        yield f"settings/{group}.md", f"# {title}\n\nSelect one with `fedssl {group}=CHOICE`.\n\n{table}\n"


def choice(group: str, name: str, text: str) -> str:
    """Return the page of a choice: head of its file, equations, settings, and docstring of its target."""
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
    rows = list(settings(text))
    if rows:
        lines += ["## Settings", "", "| setting | default | |", "|---|---|---|"]
        lines += [f"| `{row.key}` | {as_code(row.default)} | {_linked(_cell(row.comment), up)} |" for row in rows]
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
    """Return the equations of a choice, or those of the longest name that its last component starts with."""
    folder, last = Path(__file__).parent / "equations" / group, name.rpartition("/")[2]
    names = [name, *("_".join(last.split("_")[:count]) for count in range(last.count("_") + 1, 0, -1))]
    return next((file for candidate in names if (file := folder / f"{candidate}.md").is_file()), None)


def with_mathml(text: str) -> str:
    """Replace LaTeX between dollars by MathML, which browsers render without a script."""

    def to_mathml(match: re.Match[str]) -> str:
        block = match[1] is not None
        formula = convert(match[1] or match[2], display="block" if block else "inline").replace("|", "&#124;")
        # Markdown parses a line that starts with <math as a block.
        return f"\n<div>{formula}</div>\n" if block else f"<span>{formula}</span>"

    pieces = re.split(r"(```.*?```|`[^`]*`)", text, flags=re.DOTALL)  # code contains dollars, too
    return "".join(piece if piece.startswith("`") else _FORMULA.sub(to_mathml, piece) for piece in pieces)


def head_lines(text: str) -> list[str]:
    """Return the comment at the start of a file, with commands as code."""
    comments = [line.removeprefix("#").strip() for line in text.split("\n", 200) if line.startswith("#")]
    count = next((index for index, line in enumerate(text.splitlines()) if not line.startswith("#")), len(comments))
    lines = [line for line in comments[:count] if not line.startswith("@package")]
    return [f"\n```\n{line}\n```\n" if line.startswith("fedssl") else _plain(line) for line in lines]


def head(text: str) -> str:
    """Return the comment at the start of a file, on one line."""
    return " ".join(line for line in head_lines(text) if not line.startswith("\n```"))


def settings(text: str) -> Iterator[Setting]:
    """Yield the settings of a file with dotted keys, and with the comments above and behind them."""
    above: list[tuple[int, str]] = []
    comments: list[str] = []
    for line in itertools.dropwhile(lambda line: line.startswith("#"), text.splitlines()):
        if line.lstrip().startswith("#"):
            comments.append(line.lstrip("# "))
            continue
        comment, comments = " ".join(comments), []
        match = _SETTING.match(line)
        if match is None or match[2] == "defaults":
            continue
        indent = len(match[1])
        above = [(before, key) for before, key in above if before < indent]
        key = ".".join([*(key for _, key in above), match[2]])
        above.append((indent, match[2]))
        if match[3] or match[4]:
            yield Setting(key, match[3] or "", " ".join(filter(None, (comment, match[4]))))


def as_code(text: str) -> str:
    """Return the text as code of a table's cell; empty text stays empty."""
    return f"`{text.replace('|', '/')}`" if text else ""


def module_pages() -> Iterator[tuple[str, str]]:
    """Yield a page for every package and for each of its modules; the search finds the guide instead."""
    unsearched = "---\nsearch:\n  exclude: true\n---\n"
    for package in PACKAGES:
        rows = []
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if parts[-1] != "__init__":
                content = f"::: {name}\n    options: {{show_root_heading: false}}\n"
                yield f"modules/{name}.md", f"{unsearched}# `{name}`\n\n{content}"
                rows.append(f"- [`{name}`]({name}.md)")
        yield f"modules/{package}.md", "\n".join([f"{unsearched}# `{package}`", "", *rows, ""])


def _is_on_site(link: str) -> bool:
    inside = not link.startswith("..") and (ROOT / "docs" / link.partition("#")[0]).is_file()
    return inside or link.startswith(("http", "#"))


def _plain(text: str) -> str:
    """Escape Markdown."""
    return re.sub(r"([*_|\[\]`])", r"\\\1", text.replace("<", "&lt;").replace(">", "&gt;"))


def _linked(text: str, up: str) -> str:
    """Link the pages of docs/ that escaped text names."""
    return re.sub(r"\bdocs/((?:\w|\\_)+\.md)\b", lambda page: f"[{page[1]}]({up}{page[1].replace(chr(92), '')})", text)


def _cell(text: str) -> str:
    return text if "\\" in text else _plain(text)
