"""format=peft: a folder with the names, shapes and scale of PEFT, and refusals."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from fedssl.base_layers import layers_digest, read_base, save_base
from fedssl.errors import InputError
from fedssl.export import cli, load_encoder
from fedssl.export.peft_adapter import CONFIG, WEIGHTS, merge_adapter
from fedssl.tuning import lora
from simulation.run import run
from tests.cases import some
from tests.fedssl.export.made import RESNET, source_of

SMALL = ["num_clients=2", "rounds=1", "local_epochs=2", "dataset.limit=60"]
SMALL += ["threads=1", "batch_size=16", "partition=iid"]
SMALL += ["evaluate_every=0", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]
SMALL += ["method.projector.hidden_dim=8", "tuning=lora", "tuning.rank=2", "tuning.alpha=8"]
VIT = ["encoder=vit_tiny", "encoder.width=8", "encoder.depth=1", "encoder.heads=2", "encoder.patch=4"]
ADAPTER_FILE = "adapter.safetensors"
PREFIX = "base_model.model."
BLOCK = "encoder.layers.encoder_layer_0"


@pytest.fixture(scope="module")
def conv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conv") / "run"
    run([*SMALL, "encoder.width=4", "tuning.targets=[blocks.1.0,blocks.3.0]", f"output_dir={folder}"])
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit") / "run"
    run([*SMALL, *VIT, "tuning.targets=[in_proj,mlp.0]", f"output_dir={folder}"])
    return folder


def export(folder, **options):
    return cli.run([f"run={folder}", "format=peft", *(f"{key}={value}" for key, value in options.items())])


def test_the_encoder_file_is_that_of_the_plain_architecture(conv):
    """Weights of adapted layers are W + alpha / r B A, and those of the others are the base layers."""
    assert_adapter_gives_encoder(conv)


def test_the_printed_code_gives_peft_the_weights_before_training(vit, tmp_path, monkeypatch):
    received = []

    class PeftModel(torch.nn.Module):
        @classmethod
        def from_pretrained(cls, encoder, folder):
            received.extend([encoder.state_dict(), folder])
            return cls()

    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=PeftModel))
    printed = export(vit, output=tmp_path / "adapter")
    exec(printed[printed.index("from peft") :], {})
    weights, folder = received
    base = read_base(vit / "base")
    assert folder == str(tmp_path / "adapter")
    assert weights.keys() == load_encoder(vit / "encoder.pt").state_dict().keys()
    for name, weight in weights.items():
        assert torch.equal(weight, torch.from_numpy(base[f"encoder.{name}"])), name


def assert_adapter_gives_encoder(conv):
    base = {name.removeprefix("encoder."): torch.from_numpy(array) for name, array in read_base(conv / "base").items()}
    weights, factors = load_encoder(conv / "encoder.pt").state_dict(), load_file(conv / ADAPTER_FILE)
    assert weights.keys() == {name for name in base if not name.endswith("lora_A")}  # freeze_a never sends A
    assert set(factors) == {f"blocks.{block}.0.lora_{factor}" for block in (1, 3) for factor in "AB"}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        expected = base[name]
        if f"{layer}.lora_A" in factors:
            a, b = (factors[f"{layer}.lora_{factor}"].double() for factor in "AB")
            assert b.any()
            expected = (expected.double() + 8 / 2 * (b @ a).view_as(weight)).float()
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("aggregation", some(["freeze_a", "svd", "exact", "stack"], default=("freeze_a", "stack")))
def test_an_adapter_gives_the_encoder_or_does_not_exist(tmp_path, aggregation, capsys):
    """exact and stack add products to the base weights, so that the factors are only a part of the change."""
    folder = tmp_path / "run"
    targets = ["encoder.width=4", "tuning.targets=[blocks.1.0,blocks.3.0]"]
    run([*SMALL, *targets, "strategy=fedavg", f"tuning.aggregation={aggregation}", f"output_dir={folder}"])
    changes_weights = aggregation in ("exact", "stack")
    assert (folder / ADAPTER_FILE).exists() != changes_weights
    assert ("no adapter.safetensors: the aggregation" in capsys.readouterr().out) == changes_weights
    if changes_weights:
        message = "adapter.safetensors does not exist: format=peft is for .* svd, which keep"
        with pytest.raises(InputError, match=message):
            export(folder)
    else:
        assert_adapter_gives_encoder(folder)


def test_convolutions_have_the_kernels_of_peft(conv):
    assert "largest difference of representations" in export(conv)
    folder = conv / "encoder-peft"
    config, factors = json.loads((folder / CONFIG).read_text()), load_file(conv / ADAPTER_FILE)
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 8)
    assert config["target_modules"] == ["blocks.1.0", "blocks.3.0"]
    adapter = load_file(folder / WEIGHTS)
    assert set(adapter) == {f"{PREFIX}blocks.{block}.0.lora_{factor}.weight" for block in (1, 3) for factor in "AB"}
    a, b = (adapter[f"{PREFIX}blocks.1.0.lora_{factor}.weight"] for factor in "AB")
    assert (a.shape, b.shape) == ((2, 4, 3, 3), (8, 2, 1, 1))
    assert torch.equal(a.flatten(1), factors["blocks.1.0.lora_A"])
    assert torch.equal(b.flatten(1), factors["blocks.1.0.lora_B"])


def test_each_encoder_of_a_run_has_its_adapter(conv, tmp_path):
    shutil.copytree(conv, tmp_path / "run")
    for name in ("encoder.pt", ADAPTER_FILE):
        file = tmp_path / "run" / name
        file.rename(file.with_stem(f"{file.stem}-cluster_1"))
    encoder = tmp_path / "run" / "encoder-cluster_1.pt"
    with pytest.raises(InputError, match="the run has 1 encoders; give one of them: encoder=.*encoder-cluster_1.pt"):
        export(tmp_path / "run")
    assert "largest difference of representations" in cli.run([f"encoder={encoder}", "format=peft"])
    assert (tmp_path / "run" / "encoder-cluster_1-peft" / WEIGHTS).is_file()


def test_weights_used_without_their_layer_are_refused(tmp_path):
    """The attention of EVA calls a function with the weight of qkv; PEFT would replace the layer in vain."""
    source = source_of(
        tmp_path, {**RESNET, "_target_": "fedssl.encoders.timm", "name": "eva02_tiny_patch14_224", "size": 28}
    )
    base = {f"encoder.{name}": value.numpy() for name, value in source.encoder.state_dict().items()}
    save_base(tmp_path / "base", base, digest=layers_digest(base))
    lora(source.encoder, rank=1, alpha=1, targets=["qkv"])
    merge_adapter(source.encoder, tmp_path / ADAPTER_FILE)
    with pytest.raises(InputError, match="format=peft does not support blocks.0.attn.qkv.weight, which the network"):
        cli.run([f"encoder={source.file}", "format=peft"])


def test_an_attention_has_factors_of_both_projections(vit, caplog):
    """PEFT adapts the output projection as well; without factors here, its product is 0."""
    export(vit, output=vit / "adapter")
    assert "out_proj" not in caplog.text  # whose product PEFT 0.21 adds twice
    adapter, factors = load_file(vit / "adapter" / WEIGHTS), load_file(vit / ADAPTER_FILE)
    names = [f"{BLOCK}.mlp.0", f"{BLOCK}.self_attention", f"{BLOCK}.self_attention.base_layer.out_proj"]
    assert set(adapter) == {f"{PREFIX}{name}.lora_{factor}.weight" for name in names for factor in "AB"}
    config = json.loads((vit / "adapter" / CONFIG).read_text())
    assert config["target_modules"] == names[:2]
    assert not adapter[f"{PREFIX}{names[2]}.lora_B.weight"].any()
    b = adapter[f"{PREFIX}{names[1]}.lora_B.weight"]
    assert torch.equal(b, factors[f"{BLOCK}.self_attention.lora_B"])
    assert b.any()


def test_encoders_without_factors_are_refused(tmp_path):
    folder = tmp_path / "run"
    run([*SMALL[:-3], "encoder.width=4", f"output_dir={folder}"])
    assert not (folder / ADAPTER_FILE).exists()
    with pytest.raises(InputError, match="format=peft is for runs with tuning=lora"):
        export(folder)


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_damaged_factors_are_refused(conv, tmp_path, content):
    file = conv / ADAPTER_FILE
    kept = file.read_bytes()
    try:
        file.write_bytes(content)
        with pytest.raises(InputError, match="adapter.safetensors cannot be used"):
            export(conv, output=tmp_path / "x")
    finally:
        file.write_bytes(kept)
    assert not (tmp_path / "x").exists()
