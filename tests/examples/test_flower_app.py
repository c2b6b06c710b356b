"""examples/flower_app: a Flower app of one's own, in this process and with ``flwr run``."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from simulation.grid import LocalGrid
from tests.flower import flwr_run

APP = Path(__file__).resolve().parents[2] / "examples" / "flower_app"


def test_the_app_trains_and_is_short(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(APP))
    from digits_ssl.client import app as client_app
    from digits_ssl.server import app as server_app

    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={"rounds": 1})
    server_app(grid=LocalGrid(client_app, num_clients=2), context=context)
    check(capsys.readouterr().out)
    for name in [name for name in sys.modules if name.partition(".")[0] == "digits_ssl"]:
        del sys.modules[name]
    for file in APP.glob("*/*.py"):
        text = file.read_text()
        assert len(text.splitlines()) <= 40, file
        assert "fedssl" not in re.sub(r'""".*?"""', "", text, flags=re.S)  # only `strategies.flower`


@pytest.mark.heavy
def test_flwr_run_completes(tmp_path):
    app = shutil.copytree(APP, tmp_path / "app")
    outcome = flwr_run(app, "--run-config", "rounds=1")
    assert outcome.status == "finished:completed", outcome.log
    check(outcome.log)


def check(output):
    """Of the features of the untrained encoder, and after the round; 0.1 is chance."""
    first, last = re.search(r"\{0: \{'accuracy': ([0-9.]+)\}, 1: \{'accuracy': ([0-9.]+)\}\}", output).groups()
    assert 0.7 < float(first) < float(last)
