"""The documented table of what is exchanged equals what the strategies describe."""

import re

import pytest

from fedssl.config.load import compose
from fedssl.config.overrides import CONF
from fedssl.methods.base import build_method

TABLE = CONF.parent / "docs" / "strategies.md"
STRATEGIES = sorted(file.stem for file in (CONF / "strategy").glob("*.yaml"))


def cells(name: str) -> str:
    settings = compose([f"strategy={name}", "method=simclr"])
    communication = settings.algorithm.strategy.instantiate().describe_communication(build_method(settings.model))
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


def _listed(metrics) -> str:
    return ", ".join(f"`{metric}`" for metric in metrics) or "none"


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_in_its_row(name):
    rows = re.findall(rf"^\| ([`\w, ]+) \| {re.escape(cells(name))} \|$", TABLE.read_text(), flags=re.M)
    assert any(f"`{name}`" in row for row in rows), f"| `{name}` | {cells(name)} |"
