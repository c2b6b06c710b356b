"""``format=huggingface``: a folder for the Hugging Face Hub, which can be used where it lies as well.

Where an argument of timm's makes the architecture (ResNets with ``encoder.stem=imagenet``, ``vit_tiny``), the folder is
one of timm's: ``timm.create_model("local-dir:FOLDER", pretrained=True)``, or ``hf-hub:USER/NAME`` once it is
uploaded. Others (``conv_small``, ResNets with a stem for small images) are loaded by fedssl:
``load_encoder("FOLDER/model.safetensors")``. Nothing is uploaded here.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from fedssl.export.encoder_file import Preprocess, load_encoder
from fedssl.export.model_card import model_card
from fedssl.export.source import ExportSource, represent
from fedssl.export.timm_weights import TimmModel, has_timm, timm_model, timm_weights
from fedssl.export.weights import write_safetensors, write_weights

CONFIG, WEIGHTS, PREPROCESSING, CARD = "config.json", "model.safetensors", "preprocessor_config.json", "README.md"


def write_huggingface(source: ExportSource, folder: Path) -> None:
    """Make the folder with its four files."""
    folder.mkdir()
    timm = _timm(source)
    if timm is None:
        write_safetensors(folder / WEIGHTS, source.content)
    else:
        write_weights(folder / WEIGHTS, timm_weights(source), metadata={})
    texts = {CONFIG: _config(source, timm), PREPROCESSING: _preprocessing(source)}
    for name, values in texts.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / CARD).write_text(model_card(source, in_timm=timm is not None), encoding="utf-8")


def run_huggingface(source: ExportSource, folder: Path, images: Tensor) -> Tensor:
    """Representations ``(batch, feature_dim)`` of images, by the folder's model as its card loads it."""
    if _timm(source) is None:
        model = load_encoder(folder / WEIGHTS, build=source.build)
    else:
        import timm

        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    form = json.loads((folder / PREPROCESSING).read_text(encoding="utf-8"))
    mean, std = tuple(form["image_mean"]), tuple(form["image_std"])
    return represent(model, Preprocess(size=form["size"]["height"], mean=mean, std=std), images)


def _timm(source: ExportSource) -> TimmModel | None:
    """What makes the model in timm by arguments alone; None if they do not."""
    model = timm_model(source) if has_timm(source) else None
    return None if model is None or model.small_stem else model


def _config(source: ExportSource, timm: TimmModel | None) -> dict[str, Any]:
    """``config.json``: timm's keys where timm loads the folder, and ours."""
    ours = {"fedssl": source.metadata_dict()}
    if timm is None:
        return ours
    encoder = source.encoder
    pretrained = {
        "input_size": [encoder.channels, encoder.size, encoder.size],
        "fixed_input_size": encoder.image_size is not None,
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "crop_mode": "squash",
        "mean": encoder.mean,
        "std": encoder.std,
        "num_classes": 0,
        "custom_load": False,
        "first_conv": "patch_embed.proj" if encoder.patch_embedding else "conv1",
        "classifier": "head" if encoder.patch_embedding else "fc",
    }
    return {
        "architecture": timm.name,
        "num_classes": 0,
        "num_features": encoder.feature_dim,
        "global_pool": timm.arguments.get("global_pool", "avg"),
        "model_args": {key: value for key, value in timm.arguments.items() if key != "num_classes"},  # stands above
        "pretrained_cfg": pretrained,
        **ours,
    }


def _preprocessing(source: ExportSource) -> dict[str, Any]:
    """``preprocessor_config.json``, in the words of transformers."""
    encoder = source.encoder
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": encoder.size, "width": encoder.size},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": encoder.mean,
        "image_std": encoder.std,
    }
