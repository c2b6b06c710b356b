"""Every strategy with every method: what is in the messages, and what comes out."""

import numpy as np
import pytest

from fedssl.config import CONF
from fedssl.model_layers import kept_names, travelling_names
from tests.federation import Federation

STRATEGIES = sorted(file.stem for file in (CONF / "strategy").glob("*.yaml"))
METHODS = sorted(file.stem for file in (CONF / "method").glob("*.yaml"))


# Its centroids must be clustered, by the server or by clients alone; the method refuses all other strategies.
CLUSTERING = ("orchestra", "local_only")
PAIRS = [(name, kind) for kind in METHODS for name in STRATEGIES if kind != "orchestra" or name in CLUSTERING]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_strategy_works_with_every_method_and_sends_no_more_than_it_declares(tmp_path, name, kind):
    federation = Federation(tmp_path, f"strategy={name}", f"method={kind}", "clients_per_round=5")
    before = {key: (array.shape, array.dtype) for key, array in federation.layers.items()}
    after = federation.run(1, 2)
    assert {key: (array.shape, array.dtype) for key, array in after.items()} == before
    assert all(np.isfinite(array).all() for array in after.values())
    assert federation.strategy.report.dropped == {}

    travelling, strategy = set(travelling_names(federation.method)), federation.strategy
    assert travelling.isdisjoint(kept_names(federation.method))
    for plan, update in zip(federation.plans, federation.updates, strict=True):
        assert set(plan) == {"arrays", "plan"}
        assert set(plan["plan"]) <= {"round", "settings", "keep-from", "lr-factor", "code", "metrics", "up"}
        assert set(plan["arrays"]) <= travelling
        assert set(update) == {"arrays", "metrics"}
        assert set(update["arrays"]) == set(plan["plan"].get("up", travelling))
        assert set(update["metrics"]) == set(strategy.metrics())
    # Without the metrics that its settings add for the log, nothing but what the rule needs is left.
    assert set(strategy.metrics()) - set(strategy.needs()) <= set(federation.settings.strategy.metrics)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_client_can_be_absent(tmp_path, name):
    few = {"krum": 5, "trimmed_mean": 5}.get(name, 2)  # fewer would be refused
    words = [f"strategy={name}", "method=byol", "num_clients=6", f"clients_per_round={few}"]
    federation = Federation(tmp_path, *words)
    assert all(np.isfinite(array).all() for array in federation.run(1, 2, 3).values())
    assert len(federation.strategy.report.clients) == few


@pytest.mark.parametrize("weighting", ["uniform", "examples", "loss"])
def test_scaling_by_the_clients_gives_the_same_global_model(tmp_path, weighting):
    words = ["strategy=l_dawa", f"strategy.weighting={weighting}"]
    server, client = (
        Federation(tmp_path / place, *words, f"strategy.scale_at={place}").run(1) for place in ("server", "client")
    )
    for name, array in server.items():
        np.testing.assert_allclose(client[name], array, rtol=1e-6, atol=1e-6, err_msg=name)
