"""Diagrams of texts, which elsewhere a script of mermaid's draws: boxes and their arrows as lists, which need none."""

import re

_BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_BOX = re.compile(r'(\w+)\["([^"]*)"\]')
_ARROW = re.compile(r'^(\w+) (?:-- "([^"]*)" )?(-->|---) (\w+)$')


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put lists in the place of diagrams."""
    return _BLOCK.sub(lambda found: as_lists(found[1]), markdown)


def as_lists(diagram: str) -> str:
    """Every box of a flowchart, those of a group below it, and behind them all arrows, as Markdown."""
    names, boxes, arrows, within = dict(_BOX.findall(diagram)), [], [], 0
    for line in map(str.strip, diagram.splitlines()[1:]):
        group = re.match(r"subgraph (\w+)", line)
        if group:
            boxes.append(f"- **{names.get(group[1], group[1])}**")
            within = 1
            continue
        if line == "end":
            within = 0
            continue
        boxes += [f"{'    ' * within}- {label}" for _, label in _BOX.findall(line)]
        arrow = _ARROW.match(_BOX.sub(r"\1", line))
        if arrow:
            start, label, kind, end = arrow.groups()
            said = f": {label}" if label else ""
            arrows.append(f"- {names.get(start, start)} {'→' if kind == '-->' else 'and'} {names.get(end, end)}{said}")
    return "\n".join([*boxes, "\n<!-- -->\n", *arrows])
