"""``format=huggingface``: a folder for the Hugging Face Hub, which also works locally.

If timm can create the architecture (ResNets with ``encoder.stem=imagenet``, vision transformers), timm loads the
folder: ``timm.create_model("local-dir:FOLDER", pretrained=True)``, or ``hf-hub:USER/NAME`` after an upload. fedssl
loads the other architectures (``conv_small``, ResNets with a stem for small images):
``load_encoder("FOLDER/model.safetensors")``. This module does not upload the folder. Its ``README.md`` is a model card
with training settings, results and usage.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedssl.config.literal import public_overrides, shell_command
from fedssl.errors import sanitize
from fedssl.evaluation.scores import as_scores, format_table
from fedssl.export.encoder_file import load_encoder
from fedssl.export.preprocess import Preprocess
from fedssl.export.source import ExportSource, represent
from fedssl.export.timm_weights import TimmModel, has_timm, timm_model, timm_weights
from fedssl.export.weights import KEY, write_safetensors, write_weights
from fedssl.plots.partition import read_partition_table
from fedssl.runs.run import Run

CONFIG, WEIGHTS, PREPROCESSING, CARD = "config.json", "model.safetensors", "preprocessor_config.json", "README.md"

# Rows of the model card and their settings.
_ROWS = {
    "data set": "dataset",
    "clients": "num_clients",
    "clients per round": "clients_per_round",
    "partition": "partition",
    "Dirichlet alpha": "partition.alpha",
    "rounds": "rounds",
    "local epochs": "local_epochs",
    "batch size": "batch_size",
    "method": "method",
    "strategy": "strategy",
    "regularizer": "regularizer",
    "schedule": "schedule",
    "encoder": "encoder",
    "seed": "seed",
}

_TIMM = """```python
import timm
from PIL import Image, ImageOps

image = ImageOps.exif_transpose(Image.open("FILE"))CONVERT
encoder = timm.create_model("hf-hub:USER/NAME", pretrained=True).eval()  # or "local-dir:FOLDER"
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(encoder))
features = encoder(transform(image)[None]).detach()
```

Transparent pixels had the value BACKGROUND of 255 in training. Pillow clips 16-bit values: for such images, this is the
preprocessing of training, also of a list of files:

```python
from fedssl.export import Preprocess

transform = PREPROCESS
features = encoder(transform("FILE")).detach()
```"""
_TIMM_FILES = """```python
import timm
from fedssl.export import Preprocess

transform = PREPROCESS
encoder = timm.create_model("hf-hub:USER/NAME", pretrained=True).eval()  # or "local-dir:FOLDER"
features = encoder(transform("FILE")).detach()  # of a file, or a list of files
```

timm's own transform does not read these files as in training."""
_CONVERT = {1: '.convert("L")', 3: '.convert("RGB")'}  # by channels
_OURS = """```python
from fedssl.export import load_encoder

encoder = load_encoder("FOLDER/model.safetensors")  # needs safetensors
features = encoder(encoder.preprocess("FILE")).detach()  # or a list of files
```"""


def write_huggingface(source: ExportSource, folder: Path) -> None:
    """Write the folder with its four files."""
    folder.mkdir()
    timm = _timm(source)
    if timm is None:
        write_safetensors(folder / WEIGHTS, source.content)
    else:
        metadata = {KEY: json.dumps(source.metadata_dict())}  # which `encoder.weights=FOLDER` reads
        write_weights(folder / WEIGHTS, timm_weights(source), metadata=metadata)
    texts = {CONFIG: _config(source, timm), PREPROCESSING: _preprocessing(source)}
    for name, values in texts.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / CARD).write_text(model_card(source, in_timm=timm is not None), encoding="utf-8")


def run_huggingface(source: ExportSource, folder: Path, images: Tensor) -> Tensor:
    """Compute the representations ``(batch, feature_dim)`` of images by the folder's model."""
    if _timm(source) is None:
        model = load_encoder(folder / WEIGHTS, build=source.build)
    else:
        import timm

        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    form = json.loads((folder / PREPROCESSING).read_text(encoding="utf-8"))
    mean, std = (torch.tensor(form[key]).view(-1, 1, 1) for key in ("image_mean", "image_std"))
    pixels = source.inputs(images) * (form["rescale_factor"] if form["do_rescale"] else 1)
    return represent(model, lambda values: (values - mean) / std, pixels)


def _timm(source: ExportSource) -> TimmModel | None:
    """Return the model of timm; None if timm's arguments cannot create it."""
    model = timm_model(source) if has_timm(source) else None
    return None if model is None or model.small_stem else model


def _config(source: ExportSource, timm: TimmModel | None) -> dict[str, Any]:
    """Return ``config.json``: timm's keys if timm loads the folder, and ours."""
    ours = {"fedssl": source.metadata_dict()}
    if timm is None:
        return ours
    from timm import get_pretrained_cfg

    encoder, default = source.encoder, get_pretrained_cfg(timm.name)
    assert default is not None  # timm has the architecture
    pretrained = {
        "input_size": [encoder.channels, encoder.size, encoder.size],
        "fixed_input_size": encoder.image_size is not None,
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "crop_mode": "center",
        "mean": encoder.mean,
        "std": encoder.std,
        "num_classes": 0,
        "custom_load": False,
        "first_conv": default.first_conv,
        "classifier": default.classifier,
    }
    return {
        "architecture": timm.name,
        "num_classes": 0,
        "num_features": encoder.feature_dim,
        "model_args": {key: value for key, value in timm.arguments.items() if key != "num_classes"},  # is above
        "pretrained_cfg": pretrained,
        **ours,
    }


def _preprocessing(source: ExportSource) -> dict[str, Any]:
    """Return ``preprocessor_config.json`` with the keys of transformers, for the geometry of training."""
    encoder, scales_files = source.encoder, source.encoder.preprocess.percentiles is not None
    low, high = encoder.preprocess.window or (0, 255)
    # Without the clip of a window: (x / (high - low) - low / (high - low) - mean) / std.
    shift = low / (high - low)
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": encoder.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": encoder.size},
        "resample": 2,  # bilinear
        "do_center_crop": True,
        "crop_size": {"height": encoder.size, "width": encoder.size},
        "do_rescale": not scales_files,  # by percentiles of each file, which the model card states
        "rescale_factor": 1 / (high - low),
        "do_normalize": True,
        "image_mean": [mean + shift for mean in encoder.mean],
        "image_std": encoder.std,
    }


def model_card(source: ExportSource, *, in_timm: bool) -> str:
    """Return the ``README.md`` of a model, which timm or fedssl loads; the owner adds the license."""
    encoder = source.encoder
    library = "timm" if in_timm else "fedssl"
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: image-feature-extraction\nlicense: unknown\n"
        "tags:\n- fedssl\n- federated-learning\n- self-supervised-learning\n---",
        "# An encoder trained by federated self-supervised learning",
        f"It maps images with {encoder.channels} channel(s), the shorter side resized to {encoder.size} pixels and the "
        f"center cropped, to {encoder.feature_dim} numbers. It has no classifier. Made with fedssl.",
        "**License:** not specified. Add it here and in the metadata at the top of this file.",
        "## Use\n\n" + (_timm_code(encoder.preprocess) if in_timm else _OURS),
        f"{_scaling(encoder.preprocess)}. Then the mean {list(encoder.mean)} is subtracted and the result divided by "
        f"{list(encoder.std)}, per channel.",
        "## Training\n\n" + _table(_training(source)),
    ]
    if source.run is not None:
        parts += _results(source.run)
    return "\n\n".join(parts) + "\n"


def _timm_code(preprocess: Preprocess) -> str:
    """Return code with timm's transform where it has the values of training, for images of 8 bits."""
    convert = _CONVERT.get(len(preprocess.mean)) if preprocess.takes_bytes else None
    code = _TIMM_FILES if convert is None else _TIMM.replace("CONVERT", convert)
    return code.replace("PREPROCESS", repr(preprocess)).replace("BACKGROUND", str(preprocess.background))


def _scaling(preprocess: Preprocess) -> str:
    if preprocess.takes_bytes:
        return "Pixels of 8 bits are divided by 255, those of 16 bits by 65,535"
    limits = f"the percentiles {list(preprocess.percentiles or ())}" if preprocess.window is None else preprocess.window
    return f"Values of more than 8 bits are scaled from {limits} of an image to [0, 1], and others divided by 255"


def _training(source: ExportSource) -> dict[str, str]:
    """Return the rows of the table, from the run or, without a run, from the encoder's file."""
    if source.run is None:
        return {sanitize(key): sanitize(value) for key, value in source.content["metadata"].items()}
    rows = {name: source.run.value(key) for name, key in _ROWS.items()}
    if source.run.ended_early:
        rows["rounds"] = f"{source.run.progress}, ended by early_stopping"
    partition = read_partition_table(source.run.folder / "partition.csv")
    if partition is not None:
        rows["images of all clients"] = str(int(partition[0].sum()))
    return {name: value for name, value in rows.items() if value}


def _results(run: Run) -> list[str]:
    """Return results, command and versions of the run's summary."""
    summary = run.summary
    if summary is None or not run.finished:
        return ["## Results\n\nThe run has no results."]
    table = format_table({name: as_scores(results, summary.get("units")) for name, results in summary["final"].items()})
    versions = summary.get("versions")
    listed = versions.items() if isinstance(versions, dict) else ()
    return [
        f"## Results\n\nOn the data set above, for one run with seed {run.seed}. Standard deviations are over draws of "
        "labels. `untrained` is the encoder before training, `pixels` are the raw pixels.",
        f"```\n{sanitize(table, lines=True)}\n```",
        f"Command:\n\n```\n{sanitize(shell_command(public_overrides(summary['overrides'])))}\n```",
        "Versions: " + (", ".join(f"{sanitize(name)} {sanitize(value)}" for name, value in listed) or "unknown") + ".",
    ]


def _table(rows: dict[str, str]) -> str:
    body = [f"| {name} | {value.replace('|', ' ')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *body])
