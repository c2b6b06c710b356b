"""Federations with tuning=adapter: what travels, what stays as it is, whole runs, and encoders of finished runs."""

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.export import load_encoder
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_names, load_layers, read_layers
from fedssl.runs.verify import verify_run
from fedssl.wire.messages import ARRAYS
from server_app.checkpoint import latest_checkpoint
from simulation.run import run
from tests.cases import some
from tests.federation import TINY, Federation
from tests.resuming import repeat_from
from tests.runs import model_bits

ADAPTER = ["tuning=adapter", "tuning.bottleneck=3", "method.projector.hidden_dim=8"]
QUIET = ["evaluate_every=0", "collapse_images=0", "measure_resources=false"]
STRATEGIES = (
    "clustered",
    "eua",
    "euc",
    "featarc",
    "fedavg",
    "fedbn",
    "fedema",
    "fedu",
    "gossip",
    "l_dawa",
    "local_only",
)
STRATEGIES += ("local_only", "median", "moon", "per_ssl", "scaffold")  # others exchange what fedavg does
NEEDS = {
    "fedu": ["method=byol"],
    "fedema": ["method=byol"],
    "per_ssl": ["method=byol"],
    "featarc": ["strategy.num_images=16"],
    "clustered": ["strategy.num_images=16"],
}


def is_trained(name):
    part, _, rest = name.partition(".")
    return part not in ("encoder", "target_encoder") or rest.startswith("adapters.")


@pytest.mark.parametrize("strategy", some(STRATEGIES, default=("eua", "fedbn", "per_ssl")))
def test_strategies_exchange_adapters_and_heads_alone(tmp_path, strategy):
    federation = Federation(tmp_path, *ADAPTER, f"strategy={strategy}", *NEEDS.get(strategy, []))
    method = federation.method
    base = {name: value.copy() for name, value in read_layers(method, method.base_names).items()}
    start = {name: value.copy() for name, value in read_layers(method, exchanged_names(method)).items()}
    federation.run(2)
    assert federation.report.dropped == {}
    for message in (*federation.plans, *federation.updates):
        assert all(is_trained(name) for name in message.array_records[ARRAYS])
    assert all(np.array_equal(value, base[name]) for name, value in read_layers(method, base).items())
    for model in federation.state.models.values():
        assert all(is_trained(name) for name in model.layers)
        ups = [name for name in model.layers if name.startswith("encoder.adapters.") and name.endswith("up.weight")]
        assert all(model.layers[name].any() and not start[name].any() for name in ups)


@pytest.mark.heavy
@pytest.mark.parametrize("blocks", ["null", "1"])
def test_a_run_resumes_with_equal_bits(tmp_path, blocks):
    folder = tmp_path / "run"
    overrides = [*TINY, *ADAPTER, f"tuning.blocks={blocks}", "method=byol", "rounds=2", *QUIET]
    run([*overrides, "keep_checkpoints=2", f"output_dir={folder}"])
    layers = latest_checkpoint(folder / "checkpoints").models["global"].layers
    again = repeat_from(1, folder)
    assert model_bits(again) == model_bits(folder)

    method = build_method(compose([*overrides, f"output_dir={folder}"]).model).eval()
    initial = {name: value.clone() for name, value in method.encoder.state_dict().items()}
    load_layers(method, layers)
    images = torch.rand(4, 1, 8, 8)
    for encoder in (load_encoder(folder / "encoder.pt"), load_encoder(again / "encoder.pt")):
        assert torch.equal(encoder(images), method.encoder(images))
        assert encoder.adapter_settings == {"bottleneck": 3, "blocks": 4 if blocks == "null" else 1}
        weights = encoder.state_dict()
        changed = weights_of_adapters(weights)
        assert all(torch.equal(weights[name], value) == (name not in changed) for name, value in initial.items())
    assert verify_run(folder).problems == ()


def weights_of_adapters(names):
    return {name for name in names if name.startswith("adapters.")}
