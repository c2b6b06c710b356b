"""Every strategy with every method: what is in the messages, and what comes out."""

import numpy as np
import pytest

from fedssl.config.overrides import CONF
from fedssl.model_arrays import exchanged_names, local_names, part_name
from tests.federation import Federation
from tests.methods import METHODS, overrides_of

STRATEGIES = sorted(file.stem for file in (CONF / "strategy").glob("*.yaml"))


# Strategies know a method by its parts alone: a predictor and a target (byol, and so moco_v3), a server side
# (orchestra), a classifier (supervised). Each goes with strategies of two kinds of client side and of exchange.
CORE = {("featarc", "byol"), ("local_only", "byol"), ("euc", "orchestra"), ("l_dawa_fedu", "supervised")}
OTHERS = {(name, "byol") for name in STRATEGIES} | {("l_dawa_fedu", kind) for kind in METHODS}
OTHERS |= {(name, "orchestra") for name in STRATEGIES if name not in ("clustered", "featarc")}


@pytest.mark.parametrize(
    ("name", "kind"), [*sorted(CORE), *(pytest.param(*pair, marks=pytest.mark.heavy) for pair in sorted(OTHERS - CORE))]
)
def test_strategies_with_methods_send_what_they_declare(tmp_path, name, kind):
    few = {"krum": 5, "trimmed_mean": 5}.get(name, 2)  # fewer would be refused
    overrides = [f"num_clients={few + 1}", f"clients_per_round={few}"]  # in every round a client is absent
    federation = Federation(tmp_path, f"strategy={name}", *overrides_of(kind), *overrides)
    before = {key: (array.shape, array.dtype) for key, array in federation.layers.items()}
    after = federation.run(3)
    assert {key: (array.shape, array.dtype) for key, array in after.items()} == before
    assert all(np.isfinite(array).all() for array in after.values())
    assert federation.report.dropped == {}
    assert len(federation.report.clients) == few

    method, travelling = federation.method, set(exchanged_names(federation.method))
    assert travelling.isdisjoint({*local_names(method), *method.uploaded_parts, *method.broadcast_parts})
    needs = set(federation.strategy.describe_communication(method).required_metrics)
    for plan, update in zip(federation.plans, federation.updates, strict=True):
        several = ["arrays-1"] if name in ("featarc", "clustered") else []  # models to choose from
        down, up = (["strategy-broadcast"], ["strategy-upload"]) if name == "scaffold" else ([], [])
        assert set(plan) == {"arrays", "method-broadcast", "config", *several, *down}
        assert all(set(plan[other]) == set(plan["arrays"]) for other in several)
        assert ("model-index" in update["reply-config"]) == bool(several)
        known = {"round", "settings", "oldest-resumable-round", "lr-factor", "code-fingerprint"}
        known |= {"wire-dtype", "metrics", "upload-names"}
        assert set(plan["config"]) <= known
        assert set(plan["arrays"]) <= travelling
        sent = {part_name(layer) for layer in plan["method-broadcast"]}
        assert sent | set(method.static_parts) == set(method.broadcast_parts)
        assert set(update) == {"arrays", "method-upload", "metrics", "reply-config", *up}
        named = plan["config"].get("upload-names")
        assert set(update["arrays"]) == (travelling if named is None else set(named.splitlines()[1:]))
        assert set(update["method-upload"]) == set(method.uploaded_parts)
        assert set(update["metrics"]) == needs | set(federation.settings.algorithm.reported_metrics)


def test_scaling_by_the_clients_gives_the_same_global_model(tmp_path):
    overrides = ["strategy=l_dawa", "strategy.weighting=examples"]
    server, client = (
        Federation(tmp_path / place, *overrides, f"strategy.scale_at={place}").run(1) for place in ("server", "client")
    )
    for name, array in server.items():
        np.testing.assert_allclose(client[name], array, rtol=1e-6, atol=1e-6, err_msg=name)
