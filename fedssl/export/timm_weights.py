"""``format=timm``: the weights with the names of timm (https://github.com/huggingface/pytorch-image-models).

timm has our ResNets and vision transformers, but not ``conv_small``. Its ResNets begin with a 7x7 convolution of stride
2 and max pooling; two lines replace these by a stem for small images (`TimmModel.code`).
"""

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedssl import encoders
from fedssl.errors import InputError
from fedssl.export.source import ExportSource, represent
from fedssl.export.weights import KEY, write_weights
from fedssl.pretrained.names import TO_TIMM_VIT, substitute

_RESNETS = ("resnet18", "resnet34", "resnet50")
_VITS = ("vit_tiny", "vit_small", "vit_base")
_TIMM = "timm"


@dataclass(frozen=True, kw_only=True)
class TimmModel:
    """The encoder's architecture in timm."""

    name: str
    arguments: dict[str, Any]  # further arguments of ``timm.create_model``
    small_stem: bool  # whether the first convolution and the pooling are those of the stem for small images

    def code(self, file: Path) -> str:
        """Return Python code that loads ``file`` as ``encoder``."""
        arguments = "".join(f", {key}={value!r}" for key, value in self.arguments.items())
        lines = ["import timm", "", f"encoder = timm.create_model({self.name!r}{arguments})"]
        if self.small_stem:
            channels = self.arguments["in_chans"]
            lines.insert(1, "from torch import nn")
            lines.append(f"encoder.conv1 = nn.Conv2d({channels}, 64, 3, padding=1, bias=False)")
            lines.append("encoder.maxpool = nn.Identity()")
        lines += [f"timm.models.load_checkpoint(encoder, {str(file)!r})", "encoder.eval()"]
        return "\n".join(lines)

    def make(self) -> nn.Module:
        """Build the model with random weights."""
        import timm

        model: nn.Module = timm.create_model(self.name, **self.arguments)
        if self.small_stem:
            model.conv1 = nn.Conv2d(self.arguments["in_chans"], 64, 3, padding=1, bias=False)
            model.maxpool = nn.Identity()
        return model


def has_timm(source: ExportSource) -> bool:
    """Return whether timm has the encoder's architecture; it has none with adapters."""
    package, _, name = source.architecture.rpartition(".")
    return "adapters" not in source.content and package == encoders.__name__ and name in (*_RESNETS, *_VITS, _TIMM)


def timm_model(source: ExportSource) -> TimmModel:
    """Return the encoder's architecture in timm."""
    name = source.architecture.rpartition(".")[2]
    if not has_timm(source):
        raise InputError(
            f"format=timm supports only architectures that timm has ({', '.join((*_RESNETS, *_VITS))}) and this "
            f"encoder is {name}{' with adapters' * ('adapters' in source.content)}; choose format=onnx, torch_export "
            "or safetensors"
        )
    bound = inspect.signature(vars(encoders)[name]).bind(
        **{key: value for key, value in source.content["encoder"].items() if key != "_target_"}
    )
    bound.apply_defaults()  # of settings that are missing in the file
    settings = bound.arguments
    if name == _TIMM:
        from fedssl.encoders.timm_networks import creation_arguments

        arguments = creation_arguments(settings["name"], channels=settings["channels"], size=settings["size"])
        return TimmModel(name=settings["name"], arguments=arguments, small_stem=False)
    arguments = {"num_classes": 0, "in_chans": settings["channels"]}
    if name in _RESNETS:
        norm = {"norm_layer": "groupnorm"} if settings["norm"] == "group" else {}
        return TimmModel(name=name, arguments=arguments | norm, small_stem=settings["stem"] == "small")
    token = settings["pool"] == "token"
    arguments |= {
        "img_size": settings["size"],
        "patch_size": settings["patch"],
        "embed_dim": settings["width"],
        "depth": settings["depth"],
        "num_heads": settings["heads"],
        "class_token": token,
        "global_pool": "token" if token else "avg",
        "fc_norm": False,
    }
    arguments |= {"reg_tokens": settings["registers"]} if settings["registers"] else {}
    return TimmModel(name=f"{name}_patch16_224", arguments=arguments, small_stem=False)


def timm_weights(source: ExportSource) -> dict[str, Tensor]:
    """Return the weights with timm's names, including a transformer's fixed position embeddings.

    timm adds positions to registers, too; they are 0.
    """
    weights = dict(source.encoder.state_dict())
    if source.architecture.rpartition(".")[2] not in _VITS:
        return weights  # timm's ResNets have torchvision's names
    weights["encoder.pos_embedding"] = source.encoder.positions(source.encoder.grid).detach()
    return {substitute(name, TO_TIMM_VIT): value for name, value in weights.items()}


def write_timm(source: ExportSource, file: Path) -> None:
    """Write the weights, with the model's arguments and `ExportSource.metadata_dict` as metadata."""
    model = timm_model(source)
    metadata = {**source.metadata_dict(), "timm": {"name": model.name, **model.arguments}}
    write_weights(file, timm_weights(source), metadata={KEY: json.dumps(metadata)})


def run_timm(source: ExportSource, file: Path, images: Tensor) -> Tensor:
    """Compute the representations ``(batch, feature_dim)`` of images by timm's model with the file's weights."""
    import timm

    model = timm_model(source).make()
    timm.models.load_checkpoint(model, str(file))
    return represent(model.eval(), source.encoder.preprocess, images)
