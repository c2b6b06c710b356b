"""The command ``fedssl-export``: the encoder of a finished run in a format of other programs.

    fedssl-export run=DIR format=NAME [output=FILE_OR_FOLDER]
    fedssl-export encoder=FILE format=NAME ...
    fedssl-export run=DIR format=onnx precision=int8 [dataset.key=value ...]

What is written is run and compared with the encoder, and left there only if it gives the same representations. Without
``output=`` it lies beside the encoder. ``precision=int8`` looks at images: those of the run's data set, or of the one
that ``dataset=NAME`` names, as for ``fedssl-evaluate``.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedssl.command_line import run_command
from fedssl.config.load import compose_evaluation
from fedssl.config.overrides import did_you_mean
from fedssl.config.targets import SEARCHPATH_KEY, expand_config_dir_flag, user_encoder
from fedssl.datasets.base import load_federated
from fedssl.errors import InputError
from fedssl.evaluation.cli import encoder_file, match_encoder
from fedssl.export.encoder_file import load_encoder, read_content, saved_target
from fedssl.export.formats import FORMATS, TOLERANCE, check_target, export
from fedssl.export.onnx_int8 import BATCH, CALIBRATION, MEASURED, QuantizedModel, check_calibration_size, export_int8
from fedssl.export.source import ExportSource
from fedssl.export.timm_weights import timm_model
from fedssl.runs.run import read_run
from fedssl.seeding import torch_generator
from fedssl.untrusted import sanitize

USAGE = (
    f"usage: fedssl-export run=DIR format={'|'.join(FORMATS)} [output=FILE_OR_FOLDER]\n"
    "       fedssl-export encoder=FILE format=NAME ...\n"
    "       fedssl-export run=DIR format=onnx precision=int8 [dataset=NAME] [dataset.path=PATH] [key=value ...]\n"
    "       --config-dir FOLDER: your own settings, where the encoder or the data set is one of yours"
)
_OWN = ("run", "encoder", "format", "output", "precision")


def main() -> int:
    """Entry point; returns the exit status, see `run_command`."""
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(USAGE)
        return 0 if sys.argv[1:] else 2
    return run_command("fedssl-export", lambda: print(sanitize(run(expand_config_dir_flag(sys.argv[1:])), lines=True)))


def run(overrides: Sequence[str]) -> str:
    """Export as the command-line words say, and return the text to print.

    Raises
    ------
    InputError
        The words, the encoder or the data set cannot be used, or do not fit each other.
    RunError
        What was written gives other representations.
    """
    own = {key: value for key, _, value in (word.partition("=") for word in overrides) if key in _OWN}
    others = [word for word in overrides if word.partition("=")[0] not in _OWN]
    form, int8 = _format(own), _int8(own, others)
    file = encoder_file({key: value for key, value in own.items() if key in ("run", "encoder")})
    build = user_encoder(saved_target(file), others)
    source = ExportSource(
        encoder=load_encoder(file, build=build),
        content=read_content(file),
        build=build,
        run=read_run(Path(own["run"])) if "run" in own else None,
    )
    target = Path(own["output"]) if "output" in own else _beside(file, form, int8=int8)
    if int8:
        check_target(source, form, target)  # before images are read
        return _told(export_int8(source, target, _images(source, own, others)), target)
    found = export(source, form, target)
    lines = [f"written to {target}", f"largest difference of representations: {found:.1e} (allowed: {TOLERANCE:.0e})"]
    if source.run is not None and source.run.summary is None:
        lines.append(f"{source.run.folder / 'summary.json'} is missing or damaged: nothing tells of the run's results")
    return "\n".join([*lines, *([timm_model(source).code(target)] if form == "timm" else [])])


def _format(own: Mapping[str, str]) -> str:
    """The format that the words name."""
    listed = ", ".join(FORMATS)
    if "format" not in own:
        raise InputError(f"nothing says in which format; add format=NAME, one of {listed}")
    if own["format"] not in FORMATS:
        near = did_you_mean(own["format"], FORMATS)
        raise InputError(f"format={own['format']} does not exist{near}; choose one of {listed}")
    return own["format"]


def _int8(own: Mapping[str, str], others: Sequence[str]) -> bool:
    """Whether int8 is asked for; words that go with it are refused where it is not."""
    precision = own.get("precision", "fp32")
    if precision not in ("fp32", "int8"):
        raise InputError(f"precision={precision} is not valid; choose precision=fp32 or precision=int8")
    if precision == "int8" and own["format"] != "onnx":
        raise InputError(f"precision=int8 is for format=onnx, not format={own['format']}; choose format=onnx")
    idle = [word for word in others if word.partition("=")[0] != SEARCHPATH_KEY]
    if precision == "fp32" and idle:
        raise InputError(
            f"{idle[0]} says nothing to fedssl-export; leave it out (it takes {', '.join(_OWN)}, and the settings of a "
            "data set with precision=int8)"
        )
    return precision == "int8"


def _beside(file: Path, form: str, *, int8: bool) -> Path:
    """Where the export lies unless the words say otherwise."""
    ending = FORMATS[form].ending or f"-{form}"
    return file.with_name(f"{file.stem}{'-int8' if int8 else ''}{ending}")


def _images(source: ExportSource, own: Mapping[str, str], others: Sequence[str]) -> Tensor:
    """Images of the data set in the form that the encoder takes, as many as int8 needs."""
    settings = compose_evaluation(others, run=Path(own["run"]) if "run" in own else None)
    images = load_federated(match_encoder(source.encoder, settings.data, explicit_size=False)).images
    check_calibration_size(len(images))
    chosen = torch.randperm(len(images), generator=torch_generator(settings.seed, "export"))
    return images[chosen[: CALIBRATION + MEASURED]]


def _told(found: QuantizedModel, target: Path) -> str:
    """Lines on what int8 costs and saves."""
    (exact, small), (slow, fast) = found.megabytes, found.seconds
    return "\n".join(
        [
            f"written to {target}",
            f"largest difference of representations in fp32: {found.difference:.1e} (allowed: {TOLERANCE:.0e})",
            f"size: {small:.2f} MB, in fp32 {exact:.2f} MB ({exact / small:.2f} times as large)",
            f"time of {BATCH} images on one thread: {1e3 * fast:.3g} ms, in fp32 {1e3 * slow:.3g} ms "
            f"({slow / fast:.2f} times that of int8)",
            f"cosine of representations, less their mean, with those in fp32: mean {found.mean_cosine:.4f}, "
            f"least {found.least_cosine:.4f}",
        ]
    )
