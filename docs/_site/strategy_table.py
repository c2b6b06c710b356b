"""The table of what clients and server exchange under each strategy, from the strategies' own descriptions."""

from collections.abc import Sequence
from functools import cache

from conf_files import CONF

from fedssl.config.load import compose
from fedssl.methods.base import SSLMethod, build_method

_HEAD = """
## What is exchanged

The metrics are those that a strategy requires, and those that clients report for the log only.

| strategy | down | up | required | log | kept by the client |
|---|---|---|---|---|---|
"""


def strategy_table() -> str:
    """Return the table, in which strategies that exchange the same share a row."""
    rows: dict[str, list[str]] = {}
    for file in sorted((CONF / "strategy").glob("*.yaml")):
        rows.setdefault(_cells(file.stem), []).append(f"`{file.stem}`")
    return _HEAD + "".join(f"| {', '.join(names)} | {cells} |\n" for cells, names in rows.items())


@cache
def _method() -> SSLMethod:
    return build_method(compose(["method=simclr"]).model)


def _cells(name: str) -> str:
    settings = compose([f"strategy={name}", "method=simclr"])
    communication = settings.algorithm.strategy.instantiate().describe_communication(_method())
    log = [metric for metric in settings.algorithm.reported_metrics if metric not in communication.required_metrics]
    return " | ".join(
        [
            communication.download,
            communication.upload,
            _listed(communication.required_metrics),
            _listed(log),
            communication.local_state,
        ]
    )


def _listed(metrics: Sequence[str]) -> str:
    return ", ".join(f"`{metric}`" for metric in metrics) or "none"
