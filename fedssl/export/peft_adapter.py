"""``format=peft``: the factors of ``tuning=lora`` as an adapter of PEFT (https://github.com/huggingface/peft).

A run with ``tuning=lora`` writes the merged encoder (``encoder.pt``) and beside it the factors
(``adapter.safetensors``), unless its aggregation changes the weights of the base layers. The export is a folder with
``adapter_model.safetensors`` and ``adapter_config.json``, which ``peft.PeftModel.from_pretrained(encoder, FOLDER)``
loads onto the encoder before training. The weights of that encoder are in the run folder's ``base/``. PEFT 0.21 adds
the product of the output projection of `torch.nn.MultiheadAttention` twice; without ``out_proj`` in ``tuning.targets``
its encoder is ours.
"""

import json
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedssl.base_layers import read_base, stored_digests
from fedssl.config.saved_run import BASE_FOLDER
from fedssl.encoders.base import Encoder
from fedssl.errors import InputError, reason_of
from fedssl.export.source import ExportSource, represent
from fedssl.export.weights import KEY, write_weights
from fedssl.logs import log
from fedssl.low_rank_products import LowRankLayer
from fedssl.safe_io import corrupt_file_error
from fedssl.tensor_file import read_tensor_file
from fedssl.tuning import plain_copy

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # of the names in PEFT
_IN_PROJ, _OUT_PROJ = ".in_proj_weight", ".out_proj.weight"


def merge_adapter(encoder: Encoder, file: Path) -> Encoder:
    """Write the factors of an encoder, if it has any, and return it with the factors merged into its weights."""
    if not encoder.low_rank_layers:
        return encoder
    if encoder.server_merged_names:  # the factors are only a part of the change
        log.info("no %s: the aggregation of LoRA's products changed the weights as well", file.name)
    else:
        tensors, layers = encoder.state_dict(), encoder.low_rank_layers
        factors = {name: tensors[name] for layer in layers for name in (layer.a, layer.b)}
        write_weights(file, factors, metadata={KEY: json.dumps([astuple(layer) for layer in layers])})
    return plain_copy(encoder)


def read_adapter(file: Path, weights: Mapping[str, Tensor]) -> list[tuple[LowRankLayer, Tensor, Tensor]]:
    """Read A and B of each layer; `InputError` for a damaged file, or one that does not fit the encoder's weights."""
    try:
        tensors, metadata = read_tensor_file(file)
        layers = [LowRankLayer(*row) for row in json.loads(metadata[KEY])]
        factors = [(layer, tensors[layer.a], tensors[layer.b]) for layer in layers]
        for layer, a, b in factors:
            weight = weights[layer.weight]
            if (len(b), a.shape[1], b.shape[1]) != (len(weight), weight[0].numel(), len(a)):
                raise ValueError(f"the factors of {layer.weight} have other shapes than the weight")
        if not factors or len({(layer.scale, len(a)) for layer, a, _ in factors}) != 1:
            raise ValueError("its layers have no common rank and scale")
    except FileNotFoundError as error:
        raise InputError(
            f"{file} does not exist: format=peft is for runs with tuning=lora and tuning.aggregation=factors, freeze_a "
            "or svd, which keep the weights of the base layers; choose another format"
        ) from error
    except Exception as error:  # a foreign file can raise any exception
        raise corrupt_file_error(file, reason_of(error)) from error
    return factors


def write_peft(source: ExportSource, folder: Path) -> None:
    """Write the folder with its two files."""
    weights = source.content["weights"]
    factors = read_adapter(_adapter_file(source), weights)
    base = read_base(source.file.parent / BASE_FOLDER)
    if any(f"encoder.{layer.weight}" not in base for layer, _, _ in factors):
        raise InputError(
            "format=peft has an adapter for the weights before training, but tuning.aggregation=exact or stack changed "
            "them; choose another format"
        )
    tensors: dict[str, Tensor] = {}
    called = _called_modules(source)
    for layer, a, b in factors:
        if _target(layer.weight, weights) not in called:
            raise InputError(
                f"format=peft does not support {layer.weight}, which the network uses without its layer, where alone "
                "PEFT adds products; choose another format, or leave it out of tuning.targets"
            )
        weight, module = weights[layer.weight], _module(layer.weight, weights)
        if weight.ndim == 4:  # PEFT has the kernel of A, and a 1x1 convolution as B
            _check_groups(source, layer.weight)
            a, b = a.view(-1, *weight.shape[1:]), b[:, :, None, None]
        tensors |= {f"{_PREFIX}{module}.lora_A.weight": a, f"{_PREFIX}{module}.lora_B.weight": b}
    if any(".base_layer.out_proj." in name for name in tensors):
        log.warning(
            "PEFT 0.21 adds the product of out_proj twice, so that its encoder differs from encoder.pt; train without "
            "out_proj in tuning.targets, or use encoder.pt"
        )
    rank = len(factors[0][1])
    for module, weight in _other_projections(factors, weights).items():  # PEFT adapts both projections of an attention
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = weight.new_zeros(rank, weight.shape[1])
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = weight.new_zeros(len(weight), rank)
    folder.mkdir()
    write_weights(folder / WEIGHTS, tensors, metadata={})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": factors[0][0].scale * rank,
        "target_modules": sorted({_target(layer.weight, weights) for layer, _, _ in factors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def peft_code(source: ExportSource, folder: Path) -> str:
    """Return Python code that loads ``folder`` as ``encoder``, onto the weights before training."""
    stored = source.file.parent / BASE_FOLDER
    (digest, *_) = stored_digests([stored])
    return "\n".join(
        [
            "from peft import PeftModel",
            "from safetensors.torch import load_file",
            "",
            "from fedssl.export import load_encoder",
            "",
            f"encoder = load_encoder({str(source.file)!r})",
            f"base = load_file({str(stored / f'{digest}.safetensors')!r})",
            "encoder.load_state_dict({name: base[f'encoder.{name}'] for name in encoder.state_dict()})",
            f"encoder = PeftModel.from_pretrained(encoder, {str(folder)!r}).eval()",
        ]
    )


@torch.no_grad()
def run_peft(source: ExportSource, folder: Path, images: Tensor) -> Tensor:
    """Compute the representations ``(batch, feature_dim)`` of images by the base layers and the folder's adapter."""
    base = read_base(source.file.parent / BASE_FOLDER)
    adapter, _ = read_tensor_file(folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    scale = config["lora_alpha"] / config["r"]
    weights: dict[str, Tensor] = {}
    for name in source.content["weights"]:
        weight = torch.from_numpy(base[f"encoder.{name}"]).clone()
        key = f"{_PREFIX}{_module(name, source.content['weights'])}"
        if f"{key}.lora_A.weight" in adapter:
            a, b = (adapter[f"{key}.lora_{factor}.weight"].flatten(1) for factor in "AB")
            weight += scale * (b @ a).view_as(weight)
        weights[name] = weight
    model: Any = source.encoder
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        model.load_state_dict(weights)
        return represent(model, model.preprocess, images)
    finally:
        model.load_state_dict(trained)


def _adapter_file(source: ExportSource) -> Path:
    """Return the file of the factors, which is beside the encoder's; a run may have several."""
    return source.file.with_name(f"adapter{source.file.stem.removeprefix('encoder')}.safetensors")


def _called_modules(source: ExportSource) -> set[str]:
    """Return the names of the modules that the encoder calls, which are those that PEFT can replace."""
    called = set[str]()
    hooks = [
        module.register_forward_hook(lambda *_, name=name: called.add(name))
        for name, module in source.encoder.named_modules()
    ]
    represent(source.encoder, source.encoder.preprocess, source.random_images(1))
    for hook in hooks:
        hook.remove()
    return called


def _module(weight: str, weights: Mapping[str, Tensor]) -> str:
    """Return the name of the module in PEFT that adapts a weight."""
    if weight.endswith(_IN_PROJ):
        return weight.removesuffix(_IN_PROJ)
    attention = weight.removesuffix(_OUT_PROJ)
    if weight.endswith(_OUT_PROJ) and f"{attention}{_IN_PROJ}" in weights:
        return f"{attention}.base_layer.out_proj"
    return weight.removesuffix(".weight")


def _target(weight: str, weights: Mapping[str, Tensor]) -> str:
    """Return the name in ``target_modules`` of a weight."""
    return _module(weight, weights).removesuffix(".base_layer.out_proj")


def _other_projections(
    factors: list[tuple[LowRankLayer, Tensor, Tensor]], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the projections without factors of attentions with factors: modules in PEFT, and their weights."""
    adapted = {layer.weight for layer, _, _ in factors}
    attentions = {_target(weight, weights) for weight in adapted}
    attentions = {path for path in attentions if f"{path}{_IN_PROJ}" in weights}
    names = {f"{path}{end}" for path in attentions for end in (_IN_PROJ, _OUT_PROJ)}
    return {_module(name, weights): weights[name] for name in sorted(names - adapted)}


def _check_groups(source: ExportSource, weight: str) -> None:
    name = weight.removesuffix(".weight")
    if source.encoder.get_submodule(name).groups > 1:
        raise InputError(
            f"format=peft does not support the grouped convolution {name}, whose factors PEFT defines differently; "
            "choose another format, or leave it out of tuning.targets"
        )
