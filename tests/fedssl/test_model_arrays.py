"""Every strategy with every method: what is in the messages, and what comes out."""

import numpy as np
import pytest

from fedssl.config.overrides import CONF
from fedssl.model_arrays import exchanged_names, local_names
from tests.federation import Federation

STRATEGIES = sorted(file.stem for file in (CONF / "strategy").glob("*.yaml"))
METHODS = sorted(file.stem for file in (CONF / "method").glob("*.yaml"))


# Strategies know a method by its parts alone: a predictor and a target (byol, and so moco_v3), a server side
# (orchestra), a classifier (supervised). The others go with one strategy of each kind of client side and of exchange.
CORE = [(name, "byol") for name in STRATEGIES]
CORE += [(name, kind) for kind in METHODS for name in ("l_dawa_fedu", "euc")]
OTHERS = {(name, kind) for name in STRATEGIES for kind in ("orchestra", "supervised")}
OTHERS |= {(name, kind) for kind in METHODS for name in ("fedavg", "fedbn")}
OTHERS -= set(CORE)
OTHERS -= {("clustered", "orchestra"), ("featarc", "orchestra")}  # refused


@pytest.mark.parametrize(
    ("name", "kind"),
    [*sorted(set(CORE)), *(pytest.param(*pair, marks=pytest.mark.heavy) for pair in sorted(OTHERS))],
)
def test_every_strategy_works_with_every_method_and_sends_no_more_than_it_declares(tmp_path, name, kind):
    federation = Federation(tmp_path, f"strategy={name}", f"method={kind}", "clients_per_round=5")
    before = {key: (array.shape, array.dtype) for key, array in federation.layers.items()}
    after = federation.run(2)
    assert {key: (array.shape, array.dtype) for key, array in after.items()} == before
    assert all(np.isfinite(array).all() for array in after.values())
    assert federation.report.dropped == {}

    method, travelling = federation.method, set(exchanged_names(federation.method))
    assert travelling.isdisjoint({*local_names(method), *method.uploaded_parts, *method.broadcast_parts})
    needs = set(federation.strategy.describe_communication(method).required_metrics)
    for plan, update in zip(federation.plans, federation.updates, strict=True):
        several = ["arrays-1"] if name in ("featarc", "clustered") else []  # models to choose from
        assert set(plan) == {"arrays", "method-broadcast", "config", *several}
        assert all(set(plan[other]) == set(plan["arrays"]) for other in several)
        assert ("model-index" in update["reply-config"]) == bool(several)
        known = {
            "round",
            "settings",
            "oldest-resumable-round",
            "lr-factor",
            "code-fingerprint",
            "wire-dtype",
            "metrics",
            "upload-names",
        }
        assert set(plan["config"]) <= known
        assert set(plan["arrays"]) <= travelling
        assert set(plan["method-broadcast"]) == set(method.broadcast_parts)
        assert set(update) == {"arrays", "method-upload", "metrics", "reply-config"}
        up = plan["config"].get("upload-names")
        assert set(update["arrays"]) == (travelling if up is None else set(up.splitlines()))
        assert set(update["method-upload"]) == set(method.uploaded_parts)
        assert set(update["metrics"]) == needs | set(federation.settings.algorithm.reported_metrics)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_client_can_be_absent(tmp_path, name):
    few = {"krum": 5, "trimmed_mean": 5}.get(name, 2)  # fewer would be refused
    overrides = [f"strategy={name}", "method=byol", "num_clients=6", f"clients_per_round={few}"]
    federation = Federation(tmp_path, *overrides)
    assert all(np.isfinite(array).all() for array in federation.run(3).values())
    assert len(federation.report.clients) == few


@pytest.mark.parametrize("weighting", ["uniform", "examples", "loss"])
def test_scaling_by_the_clients_gives_the_same_global_model(tmp_path, weighting):
    overrides = ["strategy=l_dawa", f"strategy.weighting={weighting}"]
    server, client = (
        Federation(tmp_path / place, *overrides, f"strategy.scale_at={place}").run(1) for place in ("server", "client")
    )
    for name, array in server.items():
        np.testing.assert_allclose(client[name], array, rtol=1e-6, atol=1e-6, err_msg=name)
