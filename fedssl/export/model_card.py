"""The model card of an exported encoder: how it was trained, what it is worth, how to use it."""

import shlex

from fedssl.evaluation.scores import as_scores
from fedssl.export.source import ExportSource
from fedssl.plots.partition import read_partition_table
from fedssl.report.accuracy_table import format_table
from fedssl.runs.run import Run
from fedssl.untrusted import sanitize

# Settings of a run that the card has a row for.
_ROWS = {
    "data set": "dataset",
    "clients": "num_clients",
    "clients in a round": "clients_per_round",
    "division of the images": "partition",
    "alpha of the division": "partition.alpha",
    "rounds": "rounds",
    "local epochs": "local_epochs",
    "batch": "batch_size",
    "method": "method",
    "aggregation rule": "strategy",
    "regulariser": "regularizer",
    "schedule": "schedule",
    "encoder": "encoder",
    "seed": "seed",
}

_TIMM = """```python
import timm

encoder = timm.create_model("hf-hub:USER/NAME", pretrained=True).eval()  # or "local-dir:FOLDER"
features = encoder(images)  # standardised as preprocessor_config.json says
```"""
_OURS = """```python
from fedssl.export import load_encoder

encoder = load_encoder("FOLDER/model.safetensors")  # needs safetensors
features = encoder(encoder.preprocess(images))  # images: uint8 (batch, channels, height, width)
```"""


def model_card(source: ExportSource, *, in_timm: bool) -> str:
    """Return ``README.md`` of a model; what nobody knows but its owner is left to fill in.

    Parameters
    ----------
    in_timm : bool
        Whether timm loads the folder; fedssl does otherwise.
    """
    encoder = source.encoder
    library = "timm" if in_timm else "fedssl"
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: image-feature-extraction\nlicense: unknown\n"
        "tags:\n- fedssl\n- federated-learning\n- self-supervised-learning\n---",
        "# An encoder trained by federated self-supervised learning",
        f"It maps images with {encoder.channels} channel(s), resized to {encoder.size}x{encoder.size}, to "
        f"{encoder.feature_dim} numbers. It has no classifier. Made with fedssl.",
        "**Licence:** not stated yet. The owner fills it in here and in the head of this file.",
        "## Use\n\n" + (_TIMM if in_timm else _OURS),
        f"Pixels are divided by 255, then mean {list(encoder.mean)} is subtracted and the result divided by "
        f"{list(encoder.std)}, per channel.",
        "## Training\n\n" + _table(_training(source)),
    ]
    if source.run is not None:
        parts += _results(source.run)
    return "\n\n".join(parts) + "\n"


def _training(source: ExportSource) -> dict[str, str]:
    """Rows of the table: what the run says; without one, what the encoder's file does."""
    if source.run is None:
        return {sanitize(key): sanitize(value) for key, value in source.content["metadata"].items()}
    rows = {name: source.run.value(key) for name, key in _ROWS.items()}
    if source.run.ended_early:
        rows["rounds"] = f"{source.run.progress}, ended by early_stopping"
    held = read_partition_table(source.run.folder / "partition.csv")
    if held is not None:
        rows["images of all clients"] = str(int(held[0].sum()))
    return {name: value for name, value in rows.items() if value}


def _results(run: Run) -> list[str]:
    """What the run's summary says: the results of every encoder, the command that repeats it and the versions."""
    summary = run.summary
    if summary is None or not run.finished:
        return ["## Results\n\nThe run has no results."]
    table = format_table({name: as_scores(found, summary.get("units")) for name, found in summary["final"].items()})
    versions = summary.get("versions")
    listed = versions.items() if isinstance(versions, dict) else ()
    return [
        f"## Results\n\nOn the data set above, of one run with seed {run.seed}; the spread, where there is one, is "
        "over draws of labels. `untrained` is the encoder before training, `pixels` are the images themselves.",
        f"```\n{sanitize(table, lines=True)}\n```",
        f"Repeat it:\n\n```\n{sanitize(shlex.join(['fedssl', *summary['overrides']]))}\n```",
        "Versions: "
        + (", ".join(f"{sanitize(name)} {sanitize(value)}" for name, value in listed) or "not known")
        + ".",
    ]


def _table(rows: dict[str, str]) -> str:
    body = [f"| {name} | {value.replace('|', ' ')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *body])
