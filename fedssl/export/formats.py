"""The export formats. A file is staged, compared with the encoder, and then moved to its target."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from fedssl.errors import InputError, RunError, disk_remedy
from fedssl.export.encoder_file import load_encoder
from fedssl.export.huggingface import run_huggingface, write_huggingface
from fedssl.export.onnx import MEASURED, QuantizedModel, compare, quantize, run_onnx, write_onnx
from fedssl.export.peft_adapter import run_peft, write_peft
from fedssl.export.source import ExportSource, represent, run_torch_export, write_torch_export
from fedssl.export.timm_weights import run_timm, write_timm
from fedssl.export.weights import require_packages, write_safetensors

TOLERANCE = 1e-5  # see `difference`


@dataclass(frozen=True)
class Format:
    """An export format."""

    ending: str  # suffix of file names; empty for a folder with any name
    packages: tuple[str, ...]  # required ones
    write: Callable[[ExportSource, Path], None]  # to a new path
    # From uint8 images ``(batch, channels, size, size)`` to representations ``(batch, feature_dim)``, by the file.
    run: Callable[[ExportSource, Path, Tensor], Tensor]


def _run_safetensors(source: ExportSource, file: Path, images: Tensor) -> Tensor:
    encoder: Any = load_encoder(file, build=source.build)
    return represent(encoder, encoder.preprocess, images)


FORMATS = {
    "safetensors": Format(
        ".safetensors", ("safetensors",), lambda source, file: write_safetensors(file, source.content), _run_safetensors
    ),
    "onnx": Format(
        ".onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        write_onnx,
        lambda source, file, images: run_onnx(file, source.inputs(images)),
    ),
    "torch_export": Format(".pt2", (), write_torch_export, run_torch_export),
    "timm": Format(".timm.safetensors", ("safetensors", "timm"), write_timm, run_timm),
    "peft": Format("", ("safetensors",), write_peft, run_peft),
    "huggingface": Format("", ("safetensors", "timm"), write_huggingface, run_huggingface),
}


def export(source: ExportSource, form: str, target: Path) -> float:
    """Write the encoder in a format to a new folder ("huggingface") or a file; return the largest `difference`."""
    check_target(source, form, target)
    with staging_folder(target) as folder:
        staged = folder / target.name
        max_difference = write_checked(source, form, staged)
        staged.replace(target)
    return max_difference


def export_int8(source: ExportSource, target: Path, images: Tensor) -> QuantizedModel:
    """Write the encoder as an int8 ONNX graph, quantized from a checked graph in fp32.

    The file ``target``, which `check_target` has checked, is replaced. ``images`` are stored ones ``(n, channels, size,
    size)``, n = ``CALIBRATION + MEASURED``.
    """
    images = source.inputs(images)
    with staging_folder(target) as folder:
        exact, small = folder / "fp32.onnx", folder / target.name
        max_difference = write_checked(source, "onnx", exact)
        quantize(exact, small, images[:-MEASURED], dynamic=source.encoder.patch_embedding is not None)
        comparison = compare(exact, small, images[-MEASURED:], difference=max_difference)
        small.replace(target)
    return comparison


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Make a temporary folder beside the target; raises `InputError` if it cannot be written."""
    try:
        with TemporaryDirectory(dir=target.parent, prefix=".fedssl-export-") as folder:
            yield Path(folder)
    except OSError as error:
        raise InputError(
            f"{target} cannot be written ({error.strerror or error}); {disk_remedy(error)}, or choose another target "
            "with output="
        ) from error


def write_checked(source: ExportSource, form: str, path: Path) -> float:
    """Write to a new path, check the file, and return the maximum `difference`; raises as `export`."""
    FORMATS[form].write(source, path)
    differences = [difference(source, form, path, count=count) for count in (5, 1)]
    wrong = [value for value in differences if not value <= TOLERANCE]  # also NaN
    if wrong:
        raise RunError(
            f"the encoder in format={form} gives representations that differ by {wrong[0]:.1e} from fedssl's "
            f"(allowed: {TOLERANCE:.0e}); no file was written, choose another format"
        )
    return max(differences)


def difference(source: ExportSource, form: str, path: Path, *, count: int) -> float:
    """Return the largest difference between the encoder's representations of ``count`` random images and the file's.

    It is relative to the largest value of the encoder's representations if that is above 1.
    """
    images = source.random_images(count)
    ours = represent(source.encoder, source.encoder.preprocess, images)
    theirs = FORMATS[form].run(source, path, images)
    if theirs.shape != ours.shape:
        return float("inf")
    return float((theirs - ours).abs().max() / max(1.0, float(ours.abs().max())))


def check_target(source: ExportSource, form: str, target: Path) -> None:
    """Raise an `InputError` if the format cannot be written to the target or a package is missing."""
    require_packages(f"format={form}", *FORMATS[form].packages)
    ending = FORMATS[form].ending
    if not target.name.endswith(ending):
        raise InputError(f"output={target} has the wrong suffix for format={form}; choose a name that ends in {ending}")
    if not target.parent.is_dir():
        raise InputError(f"output={target} is in a folder that does not exist; create {target.parent} first")
    if target.is_dir() or (not ending and target.exists()):
        raise InputError(f"output={target} exists already; choose another target with output=")
