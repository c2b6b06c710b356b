"""Pages that mkdocs generates besides those in docs/: the README, every choice of every config group, every module."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads a hook by its path
sys.path.insert(0, str(Path(__file__).parents[2]))

from conf_files import CONF, GROUPS, PACKAGES, ROOT, as_code, cell, head, head_lines, settings, target
from settings_page import settings_page
from strategy_table import strategy_table

from benchmarks.fedssl_bench.results import results_page

GUIDE = {  # sections of the site, and their pages by task
    "Guide": ("install", "train", "data", "pretrained", "sweep", "evaluate", "choosing", "settings"),
    "Devices and clusters": ("devices", "deployment", "cluster", "security"),
    "Algorithms": ("strategies", "methods", "papers"),
    "Measurements": ("learning", "results", "benchmarks"),
    "Development": ("extend", "architecture"),
}
_TABLE_ROW = re.compile(r"^\|.*$", flags=re.MULTILINE)
_CODE = re.compile(r"`[^`]+`")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_PAGES = {  # files of the repository that the site shows as pages
    "conf": "settings.md",
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/fedssl_bench/results.json": "results.md",
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "index.md": (ROOT / "README.md").read_text(),
        "benchmarks.md": (ROOT / "benchmarks" / "README.md").read_text(),
        "results.md": results_page(),
        "settings.md": settings_page(),
        **dict(setting_pages()),
        **dict(module_pages()),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Replace links to files outside the site by plain text, and unescape code in tables."""
    if "/" in page.file.src_uri:  # generated
        return markdown
    markdown = _TABLE_ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    folder = {"index.md": ROOT, "benchmarks.md": ROOT / "benchmarks"}.get(page.file.src_uri, ROOT / "docs")

    def on_site(link: re.Match[str]) -> str:
        address = site_address(link[2], folder)
        return f"[{link[1]}]({address})" if address else link[1]

    return _LINK.sub(on_site, markdown)


def site_address(link: str, folder: Path) -> str:
    """Return the address on the site of what a file in ``folder`` links to; empty if the site does not have it."""
    if link.startswith(("http", "#")):
        return link
    path, hash_sign, anchor = link.partition("#")
    inside = (folder / path).resolve().relative_to(ROOT).as_posix()
    if (group := inside.removeprefix("conf/").split("/")[0]) in GROUPS:
        return f"settings/{group}.md"
    in_docs = inside.startswith("docs/") and (ROOT / inside).is_file()
    page = _PAGES.get(inside, inside.removeprefix("docs/") if in_docs else "")
    return f"{page}{hash_sign}{anchor}" if page else ""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = [
        {"fedssl": "index.md"},
        *({section: [f"{name}.md" for name in names]} for section, names in GUIDE.items()),
        {"Settings": [{title: f"settings/{group}.md"} for group, title in GROUPS.items()]},
        {"Modules": [f"modules/{package}.md" for package in PACKAGES]},
    ]
    return config


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
            rows.append(f"| [`{name}`]({group}/{name}.md) | {cell(first)} |")
        table = "\n".join(["| choice | |", "|---|---|", *rows])
        more = strategy_table() if group == "strategy" else ""
        yield f"settings/{group}.md", f"# {title}\n\nSelect one with `fedssl {group}=CHOICE`.\n\n{table}\n{more}"


def choice(group: str, name: str, text: str) -> str:
    """Return the page of a choice: head of its file, settings, and its target's docstring, which has the equations."""
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
    rows = list(settings(text))
    if rows:
        lines += ["## Settings", "", "| setting | default | |", "|---|---|---|"]
        lines += [f"| `{row.key}` | {as_code(row.default)} | {_linked(cell(row.comment), up)} |" for row in rows]
        lines.append("")
    path = target(group, text)
    module = path.rpartition(".")[0]
    if module.split(".")[0] in PACKAGES:
        modules = [module] if (ROOT / f"{module.replace('.', '/')}.py").exists() else []
    else:
        modules = [] if name == "none" else modules_of_feature(group)
    options = "    options: {members: false, show_root_heading: false, skip_local_inventory: true}"
    for module in modules:
        lines += [f"::: {module}", options, ""]
    if path.split(".")[0] in PACKAGES:
        lines += [f"::: {path}", "    options: {skip_local_inventory: true}", ""]
    return "\n".join(lines)


def modules_of_feature(group: str) -> list[str]:
    """Return the modules with the equations of a group whose choices have no class: a mod, or a package."""
    files = [ROOT / "strategies" / "mods" / f"{group}.py", *sorted((ROOT / "fedssl" / group).glob("*.py"))]
    with_equations = [file for file in files if file.is_file() and "$$" in file.read_text()]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in with_equations]


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


def _linked(text: str, up: str) -> str:
    """Link the pages of docs/ that escaped text names."""
    return re.sub(r"\bdocs/((?:\w|\\_)+\.md)\b", lambda page: f"[{page[1]}]({up}{page[1].replace(chr(92), '')})", text)
