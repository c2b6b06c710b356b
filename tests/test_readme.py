"""The documented table of what travels is what the strategies say."""

import pytest

from fedssl.config.load import compose
from fedssl.config.overrides import CONF
from fedssl.methods.base import build_method

TABLE = CONF.parent / "docs" / "strategies.md"
STRATEGIES = sorted(file.stem for file in (CONF / "strategy").glob("*.yaml"))


def row(name: str) -> str:
    settings = compose([f"strategy={name}", "method=simclr"])
    communication = settings.algorithm.strategy.instantiate().describe_communication(build_method(settings.model))
    log = [metric for metric in settings.algorithm.reported_metrics if metric not in communication.required_metrics]
    cells = [
        f"`{name}`",
        communication.download,
        communication.upload,
        _listed(communication.required_metrics),
        _listed(log),
        communication.local_state,
    ]
    return "| " + " | ".join(cells) + " |"


def _listed(metrics) -> str:
    return ", ".join(f"`{metric}`" for metric in metrics) or "none"


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_its_row(name):
    assert row(name) in TABLE.read_text().splitlines()
