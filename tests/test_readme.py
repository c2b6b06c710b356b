"""The documented table of what travels is what the strategies say."""

import pytest

from fedssl.config.load import compose
from fedssl.config.overrides import CONF
from fedssl.methods.build import build_method

TABLE = CONF.parent / "docs" / "strategies.md"
STRATEGIES = sorted(file.stem for file in (CONF / "strategy").glob("*.yaml"))


def row(name: str) -> str:
    settings = compose([f"strategy={name}", "method=simclr"])
    travels = settings.algorithm.strategy.make().travels(build_method(settings.model))
    log = [metric for metric in settings.algorithm.metrics if metric not in travels.required_metrics]
    cells = [
        f"`{name}`",
        travels.download,
        travels.upload,
        _listed(travels.required_metrics),
        _listed(log),
        travels.local_state,
    ]
    return "| " + " | ".join(cells) + " |"


def _listed(metrics) -> str:
    return ", ".join(f"`{metric}`" for metric in metrics) or "none"


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_its_row(name):
    assert row(name) in TABLE.read_text().splitlines()
