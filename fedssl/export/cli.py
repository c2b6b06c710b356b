"""The command ``fedssl-export``: export the encoder of a finished run to other programs.

    fedssl-export run=DIR format=NAME [output=FILE_OR_FOLDER]
    fedssl-export encoder=FILE format=NAME ...
    fedssl-export run=DIR format=onnx precision=int8 [dataset.key=value ...]

The export is written only if it gives the same representations as the encoder. The default of ``output=`` is a path
beside the encoder. ``precision=int8`` needs images, of the run's data set or of ``dataset=NAME``, as for
``fedssl-evaluate``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedssl.config.commands import check_effect, encoder_file, run_with_overrides, source_of
from fedssl.config.literal import path_of
from fedssl.config.overrides import did_you_mean
from fedssl.config.targets import SEARCHPATH_KEY, search_folders, user_encoder
from fedssl.datasets.base import load_federated
from fedssl.errors import InputError
from fedssl.evaluation.cli import compose_evaluation, match_encoder
from fedssl.export.encoder_file import saved_target
from fedssl.export.formats import FORMATS, TOLERANCE, check_target, export, export_int8
from fedssl.export.onnx import BATCH, CALIBRATION, MEASURED, QuantizedModel
from fedssl.export.peft_adapter import peft_code
from fedssl.export.source import ExportSource
from fedssl.export.timm_weights import timm_model
from fedssl.runs.run import read_run
from fedssl.seeding import torch_generator

USAGE = (
    f"usage: fedssl-export run=DIR format={'|'.join(FORMATS)} [output=FILE_OR_FOLDER]\n"
    "       fedssl-export encoder=FILE format=NAME ...\n"
    "       fedssl-export run=DIR format=onnx precision=int8 [dataset=NAME] [dataset.path=PATH] [key=value ...]\n"
    "       --config-dir FOLDER: folder with the settings of your own encoder or data set"
)
_EXPORT_KEYS = ("run", "encoder", "format", "output", "precision")


def main() -> int:
    """Run the command, and return its exit status, see `run_command`."""
    return run_with_overrides("fedssl-export", USAGE, run)


def run(overrides: Sequence[str]) -> str:
    """Export an encoder by the overrides, and return the text to print."""
    options = {key: value for key, _, value in (word.partition("=") for word in overrides) if key in _EXPORT_KEYS}
    others = [override for override in overrides if override.partition("=")[0] not in _EXPORT_KEYS]
    int8 = _check(options, others)
    folder_or_file, form = source_of(options), options["format"]
    file = encoder_file(folder_or_file)
    build = user_encoder(saved_target(file), search_folders(others))
    source = ExportSource.read(file, build=build, run=read_run(folder_or_file) if "run" in options else None)
    default = f"{file.stem}{'-int8' if int8 else ''}{FORMATS[form].ending or f'-{form}'}"
    target = path_of(options["output"]) if "output" in options else file.with_name(default)
    if int8:
        check_target(source, form, target)  # before images are read
        return _format_comparison(export_int8(source, target, _images(source, others)), target)
    max_difference = export(source, form, target)
    lines = [
        f"written to {target}",
        f"largest difference of representations: {max_difference:.1e} (allowed: {TOLERANCE:.0e})",
    ]
    if source.run is not None and source.run.summary is None:
        lines.append(
            f"{source.run.folder / 'summary.json'} is missing or damaged: the export has no results of the run"
        )
    lines += [timm_model(source).code(target)] if form == "timm" else []
    lines += [peft_code(source, target)] if form == "peft" and source.build is None else []
    return "\n".join(lines)


def _check(options: Mapping[str, str], others: Sequence[str]) -> bool:
    """Check format and precision, and return whether to quantize to int8; only that uses settings of a data set."""
    listed, form, precision = ", ".join(FORMATS), options.get("format"), options.get("precision", "fp32")
    if form is None:
        raise InputError(f"the format is missing; add format=NAME, one of {listed}")
    if form == "torchscript":
        raise InputError("format=torchscript was removed; choose format=torch_export, or format=onnx for C++ programs")
    if form not in FORMATS:
        raise InputError(f"format={form} does not exist{did_you_mean(form, FORMATS)}; choose one of {listed}")
    if precision not in ("fp32", "int8"):
        raise InputError(f"precision={precision} is not valid; choose precision=fp32 or precision=int8")
    if precision == "int8" and form != "onnx":
        raise InputError(f"precision=int8 is for format=onnx, not format={form}; choose format=onnx")
    unused = [override for override in others if override.partition("=")[0] != SEARCHPATH_KEY]
    if precision == "fp32" and unused:
        raise InputError(
            f"{unused[0]} has no effect on fedssl-export; remove it (allowed are {', '.join(_EXPORT_KEYS)}, "
            "and the settings of a data set with precision=int8)"
        )
    return precision == "int8"


def _images(source: ExportSource, others: Sequence[str]) -> Tensor:
    """Draw the images for int8 from the data set, with the encoder's channels and size."""
    settings = compose_evaluation(others, run=None if source.run is None else source.run.folder)
    check_effect("fedssl-export", others, groups=("dataset", "experiment", "seed"))
    given = {override.lstrip("+").partition("=")[0] for override in others} - {"dataset.size"}
    images = load_federated(match_encoder(source.encoder, settings.data, given=given)).images
    if len(images) < CALIBRATION + MEASURED:
        raise InputError(
            f"precision=int8 needs {CALIBRATION} images for calibration and {MEASURED} others to compare with fp32, "
            f"and the data set has {len(images)}; choose a larger one with dataset=NAME"
        )
    drawn = torch.randperm(len(images), generator=torch_generator(settings.seed, "export"))
    return images[drawn[: CALIBRATION + MEASURED]]


def _format_comparison(model: QuantizedModel, target: Path) -> str:
    (exact, small), (slow, fast) = model.megabytes, model.seconds
    return "\n".join(
        [
            f"written to {target}",
            f"largest difference of representations in fp32: {model.difference:.1e} (allowed: {TOLERANCE:.0e})",
            f"size: {small:.2f} MB, in fp32 {exact:.2f} MB ({exact / small:.2f} times as large)",
            f"time of {BATCH} images on one thread: {1e3 * fast:.3g} ms, in fp32 {1e3 * slow:.3g} ms "
            f"({slow / fast:.2f} times that of int8)",
            f"cosine of centered representations with those in fp32: mean {model.mean_cosine:.4f}, "
            f"minimum {model.min_cosine:.4f}",
        ]
    )
