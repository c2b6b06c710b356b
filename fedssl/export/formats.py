"""The table of formats, and the one way in which any of them is written: beside its place, compared, then put there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from fedssl.errors import InputError, RunError
from fedssl.export.encoder_file import load_encoder
from fedssl.export.extras import require_packages
from fedssl.export.huggingface import run_huggingface, write_huggingface
from fedssl.export.onnx import run_onnx, write_onnx
from fedssl.export.source import ExportSource, represent
from fedssl.export.timm_weights import run_timm, write_timm
from fedssl.export.torch_formats import run_torch_export, run_torchscript, write_torch_export, write_torchscript
from fedssl.export.weights import write_safetensors

TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of exported encoders.

    Attributes
    ----------
    ending : str
        Of the names of its files; of a folder's name, empty where any will do.
    packages : tuple of str
        What writing and reading it need.
    write : callable
        Writes a `ExportSource` to a path where nothing is.
    run : callable
        From `ExportSource`, path and images ``(batch, channels, size, size)`` in uint8 to representations ``(batch,
        feature_dim)``, with no weight but those at the path.
    """

    ending: str
    packages: tuple[str, ...]
    write: Callable[[ExportSource, Path], None]
    run: Callable[[ExportSource, Path, Tensor], Tensor]


def _run_safetensors(source: ExportSource, file: Path, images: Tensor) -> Tensor:
    encoder: Any = load_encoder(file, build=source.build)
    return represent(encoder, encoder.preprocess, images)


FORMATS = {
    "safetensors": Format(
        ending=".safetensors",
        packages=("safetensors",),
        write=lambda source, file: write_safetensors(file, source.content),
        run=_run_safetensors,
    ),
    "onnx": Format(
        ending=".onnx",
        packages=("onnx", "onnxscript", "onnxruntime"),
        write=write_onnx,
        run=lambda source, file, images: run_onnx(file, images),
    ),
    "torchscript": Format(
        ending=".torchscript",
        packages=(),
        write=write_torchscript,
        run=lambda source, file, images: run_torchscript(file, images),
    ),
    "torch_export": Format(
        ending=".pt2",
        packages=(),
        write=write_torch_export,
        run=lambda source, file, images: run_torch_export(file, images),
    ),
    "timm": Format(ending=".timm.safetensors", packages=("safetensors", "timm"), write=write_timm, run=run_timm),
    "huggingface": Format(ending="", packages=("safetensors", "timm"), write=write_huggingface, run=run_huggingface),
}


def export(source: ExportSource, form: str, target: Path) -> float:
    """Write the encoder in a format, if what is written gives the representations of ours.

    Parameters
    ----------
    form : str
        A key of ``FORMATS``.
    target : Path
        A file, which is replaced; for "huggingface" a folder that is not there yet.

    Returns
    -------
    float
        As of `difference`.

    Raises
    ------
    InputError
        A package is missing, the format cannot hold this encoder, or the place cannot be written.
    RunError
        The representations differ; nothing is left.
    """
    check_target(source, form, target)
    with staging_folder(target) as folder:
        made = folder / target.name
        found = write_checked(source, form, made)
        made.replace(target)
    return found


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target for what is not proven yet; raises `InputError` where nothing can be written."""
    try:
        with TemporaryDirectory(dir=target.parent, prefix=".fedssl-export-") as folder:
            yield Path(folder)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"{target} cannot be written ({reason}); make room, or give another place with output="
        ) from error


def write_checked(source: ExportSource, form: str, made: Path) -> float:
    """Write to a path where nothing is, run what was written, and return the `difference`; raises as `export` does."""
    FORMATS[form].write(source, made)
    found = [difference(source, form, made, count=count) for count in (5, 1)]
    wrong = [one for one in found if not one <= TOLERANCE]  # not a number is no agreement
    if wrong:
        raise RunError(
            f"the encoder in format={form} gives representations that differ by {wrong[0]:.1e} from fedssl's, where "
            f"{TOLERANCE:.0e} is allowed; nothing was written, so choose another format"
        )
    return max(found)


def difference(source: ExportSource, form: str, made: Path, *, count: int) -> float:
    """Largest difference between our representations of random images and those of what was written.

    It is a share of the largest number in our representations where that is above 1.

    Parameters
    ----------
    count : int
        Images in the batch.
    """
    images = source.random_images(count)
    ours = represent(source.encoder, source.encoder.preprocess, images)
    theirs = FORMATS[form].run(source, made, images)
    if theirs.shape != ours.shape:
        return float("inf")
    return float((theirs - ours).abs().max() / max(1.0, float(ours.abs().max())))


def check_target(source: ExportSource, form: str, target: Path) -> None:
    """Refuse, by an `InputError`, a place that the format cannot be written to, and packages that are missing."""
    require_packages(f"format={form}", *FORMATS[form].packages)
    ending = FORMATS[form].ending
    if not target.name.endswith(ending):
        raise InputError(f"output={target} is no name for format={form}; give one that ends in {ending}")
    if not target.parent.is_dir():
        raise InputError(f"output={target} lies in a folder that does not exist; make {target.parent} first")
    if target.is_dir() or (not ending and target.exists()):
        raise InputError(f"output={target} is there already; remove it, or give another place with output=")
