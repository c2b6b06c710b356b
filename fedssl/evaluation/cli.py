"""The command ``fedssl-evaluate``: evaluate the encoder of a finished run on any data set.

    fedssl-evaluate run=DIR [evaluation=NAME] [dataset=NAME] [key=value ...]
    fedssl-evaluate encoder=FILE dataset=NAME ...

``--config-dir FOLDER`` adds settings of your own encoders and data sets. The default data set is the run's;
``dataset.key=value`` changes its settings (``dataset.path=...``). Images are resized to the encoder's size, unless
``dataset.size=`` is given, and scaled and standardized as in its training, unless the data set has another window,
percentiles, background or dtype. The result is printed and written to
``evaluation/<protocol>-<dataset>.json`` beside the encoder; the file of ``fedu/linear`` begins with ``fedu_linear``.
Only the same evaluation replaces a file; the name of another one, e.g. with another path, ends with ``-2``, ``-3``, ...
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedssl.atomic_files import make_subfolder, write_text
from fedssl.config.commands import check_effect, encoder_file, run_with_overrides, source_of
from fedssl.config.component import Component
from fedssl.config.compose import resolve_config
from fedssl.config.hydra_internals import apply_overrides
from fedssl.config.literal import user_path
from fedssl.config.load import compose
from fedssl.config.overrides import parse
from fedssl.config.saved_run import read_settings
from fedssl.config.settings import DataSettings, Settings
from fedssl.config.targets import choice_targets, normalize, search_folders
from fedssl.config.typed_settings import make_settings
from fedssl.config.validation import check_types, validate_config
from fedssl.datasets.raster import adopt_pixels
from fedssl.errors import InputError, reason_of
from fedssl.evaluation.protocol import evaluate_domains, evaluation_problem, make_evaluation_input
from fedssl.evaluation.scores import Score, column_title, format_table, num_test_images, to_flat_dict, units_of
from fedssl.export import load_user_encoder
from fedssl.machine.devices import select_device
from fedssl.safe_io import read_text
from fedssl.text_table import align

USAGE = (
    "usage: fedssl-evaluate run=DIR [evaluation=knn|linear|few_labels|probes|semi_supervised|fine_tune|transfer|\n"
    "       retrieval|multi_label|regression|segmentation|PAPER/linear|PAPER/fine_tune]\n"
    "       [dataset=NAME] [dataset.path=PATH] [key=value ...]\n"
    "       fedssl-evaluate encoder=FILE dataset=NAME ...\n"
    "       --config-dir FOLDER: folder with the settings of your own encoder or data set"
)
_GROUPS = ("dataset", "evaluation", "experiment", "seed", "threads", "device")  # that act on an evaluation


class Evaluation(NamedTuple):
    """Results of an encoder, why others are missing, the name of the data set, and the file."""

    results: Mapping[str, Score]
    left_out: str
    dataset: str
    file: Path


def main() -> int:
    """Run the command, and return its exit status, see `run_command`."""
    return run_with_overrides("fedssl-evaluate", USAGE, run)


def run(overrides: Sequence[str]) -> str:
    """Evaluate an encoder by the overrides, write the JSON file, and return the text to print."""
    results, left_out, name, report = evaluate_encoder(overrides)
    return "\n".join(
        [format_table({name: results}), *_tables_of_parts(results), *filter(None, [left_out]), f"written to {report}"]
    )


def evaluate_encoder(overrides: Sequence[str]) -> Evaluation:
    """Evaluate an encoder by the overrides, and write the JSON file."""
    values = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    source = source_of(values)
    others = [override for override in overrides if override.partition("=")[0] not in ("run", "encoder")]
    file = encoder_file(source)
    settings = compose_evaluation(others, run=source if "run" in values else None)
    check_effect("fedssl-evaluate", others, groups=_GROUPS)
    protocol = settings.evaluation.protocol.instantiate()
    torch.set_num_threads(settings.machine.threads)
    encoder = load_user_encoder(file, search_folders(others))
    data = match_encoder(encoder, settings.data, given=values)
    device, needs_labels = select_device(settings.machine.device), protocol.needs_labels
    evaluation_input = make_evaluation_input(encoder, data, device=device, needs_labels=needs_labels)
    if evaluation_input is None:
        problem = evaluation_problem(data, needs_labels=needs_labels)
        raise InputError(f"{problem}, or choose another data set with dataset=")
    evaluation_input = replace(evaluation_input, pixels=vars(encoder.preprocess))  # also if this data set has others
    protocol.validate(evaluation_input, feature_dim=encoder.feature_dim)
    left_out = "; ".join(f"{name} is left out: {why}" for name, why in protocol.left_out(evaluation_input).items())
    folder = file.parent / "evaluation"
    with _writing(folder):  # an evaluation may take hours
        TemporaryFile(dir=make_subfolder(file.parent, folder.name)).close()
    results = evaluate_domains(protocol, evaluation_input, seed=settings.seed)
    if left_out and not results:
        raise InputError(f"{left_out}; choose evaluation=knn or evaluation=linear")
    name = data.name.rpartition("/")[2]
    path = data.reader.values.get("path")  # relative to this folder, which the report does not have
    located = Component({**data.reader.values, **({"path": str(user_path(path).absolute())} if path else {})})
    content = {
        "encoder": str(file),
        "evaluation": settings.evaluation.protocol.values,
        "dataset": asdict(replace(data, reader=located)),
        "seed": settings.seed,
        "images": {"train": len(evaluation_input.train.labels), "test": len(evaluation_input.test.labels)},
        "results": to_flat_dict(results),
        "units": units_of(results),
        "test_images": num_test_images([results]),
        "parts": {name: dict(score.parts) for name, score in results.items() if score.parts},
    }
    report = _report_file(folder, f"{values.get('evaluation', 'knn').replace('/', '_')}-{name}", content)
    with _writing(report):
        write_text(report, json.dumps(content, indent=2) + "\n")
    return Evaluation(results, left_out, name, report)


def _report_file(folder: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Return the file of a report: the first one that does not exist, or has the same encoder and settings."""
    subject = _subject(json.loads(json.dumps(content)))
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(file for each in names if _may_be_written(file := folder / f"{each}.json", subject))


def _may_be_written(file: Path, subject: list[Any]) -> bool:
    try:
        text = read_text(file)
    except InputError:  # to write it fails for the same reason, which is reported
        return True
    try:
        return text is None or _subject(json.loads(text)) == subject
    except (ValueError, KeyError, TypeError):  # another file
        return False


def _subject(content: Any) -> list[Any]:
    """Return what a report is about."""
    return [Path(content["encoder"]).name, *(content[key] for key in ("evaluation", "dataset", "seed", "images"))]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # the data set's name may be an invalid file name
        raise InputError(
            f"{path} cannot be written ({reason_of(error)}); make its folder writable, or copy encoder.pt to "
            "another one and give encoder=COPY dataset=NAME"
        ) from error


def _tables_of_parts(results: Mapping[str, Score]) -> list[str]:
    """Return a table of the parts of all scores that have some, e.g. with a line for each class."""
    having = {name: score for name, score in results.items() if score.parts}
    if not having:
        return []
    names = dict.fromkeys(part for score in having.values() for part in score.parts)
    columns = {
        column_title(name, score.unit): {
            part: replace(score, value=value, parts={}) for part, value in score.parts.items()
        }
        for name, score in having.items()
    }
    lines = [[part, *(of[part].number if part in of else "-" for of in columns.values())] for part in names]
    return ["", align([["", *columns], *lines], left=1)]


def compose_evaluation(overrides: Sequence[str], *, run: Path | None) -> Settings:
    """Return the settings of an evaluation; data set, seed and threads default to those of ``run``.

    A run folder is untrusted and must not select code: its data set must be one of ``conf/`` or of the user's config
    directories.
    """
    overrides = normalize(overrides)
    keys = [override.lstrip("+").partition("=")[0] for override in overrides]
    if run is None:
        if "dataset" not in keys:
            raise InputError("encoder=FILE needs a data set; add dataset=NAME, e.g. dataset=cifar10")
        return compose(overrides)
    saved = read_settings(run / "config.yaml")
    if saved is None:
        raise InputError(
            f"{run / 'config.yaml'} does not exist; set run to a run folder, or use encoder=FILE dataset=NAME"
        )
    changes = [] if "dataset" in keys else [one for one in overrides if one.lstrip("+").startswith("dataset.")]
    overrides = [override for override in overrides if override not in changes]
    config, choices = resolve_config(overrides)
    if "dataset" not in keys:
        reader = saved["dataset"]["_target_"]
        if reader not in choice_targets("dataset", search_folders(overrides)):
            raise InputError(
                f"the data set of {run} is read by {reader}, which is not part of fedssl; name its config directory "
                "with --config-dir, or another data set with dataset=NAME"
            )
        if "cache" in saved["dataset"]:
            saved["dataset"]["cache"] = "auto"  # nor may a run folder select where files are written
        try:
            node = OmegaConf.create({"dataset": saved["dataset"]})
            OmegaConf.set_struct(node, True)  # rejects other names
            apply_overrides(parse(changes), node)
            OmegaConf.resolve(node)
        except (HydraException, OmegaConfBaseException) as error:
            raise InputError(
                f"{' '.join(changes)} does not fit the data set of {run}, which has the settings "
                f"{', '.join(saved['dataset'])}; add dataset=NAME for another data set"
            ) from error
        config.dataset = node.dataset
    for key in {"seed", "threads"}.difference(keys):  # both decide bits
        config[key] = saved[key]
    check_types(config, {})
    validate_config(config)
    return make_settings(config, choices, overrides=overrides, resumed=None)


def match_encoder(encoder: Any, data: DataSettings, *, given: Collection[str]) -> DataSettings:
    """Set the encoder's statistics in the settings of a data set, and its size and pixels, unless others are set.

    ``given`` are the keys of the overrides.
    """
    if data.channels != encoder.channels:
        raise InputError(
            f"the encoder needs images with {encoder.channels} channel(s) but dataset.channels={data.channels}; add "
            f"dataset.channels={encoder.channels}, which converts between gray and RGB only"
        )
    if "dataset.size" not in given:
        data = data.resized(encoder.size)
    keep = {key.removeprefix("dataset.") for key in given}
    reader = Component(adopt_pixels(data.reader.values, vars(encoder.preprocess), keep=keep))
    return replace(data, reader=reader, mean=encoder.mean, std=encoder.std)
