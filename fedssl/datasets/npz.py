"""Arrays of images in an NPZ file of NumPy, such as those of MedMNIST: ``train_images``, ``train_labels``, ...

Images are ``(n, height, width)``, ``(n, height, width, channels)`` or ``(n, channels, height, width)``. The images of a
split are in the memory of each process.
"""

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile
from PIL import Image

from fedssl.config.literal import user_path
from fedssl.datasets.base import NO_LABEL, ImageData, subsample_indices
from fedssl.datasets.images import TensorImages
from fedssl.datasets.pixels import check_window, to_array
from fedssl.datasets.splits import matching
from fedssl.errors import InputError
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.safe_io import open_regular_file, sanitize

_SHARE = 2  # an array needs at most one part in two of the available memory
_CHANNELS = (1, 3)


def read(
    split: str,
    *,
    channels: int,
    size: int,
    limit: int | None,
    path: str | None,
    image: str = "images",
    label: str | None = "labels",
    window: Sequence[float] | None = None,
) -> ImageData | None:
    """Read the images of a split.

    Parameters
    ----------
    split : str
        Name of the split, which is part of the names of its arrays, or a word for it.
    channels, size, window
        As in `fedssl.datasets.pixels.to_array`.
    limit : int or None
        Maximum number of images; the subset is always the same.
    path : str
        The file.
    image, label : str
        Further part of the names of the arrays, as in ``train_images`` or ``x_train``. Without ``label``, images have
        no labels.

    Returns
    -------
    ImageData or None
        None if the file has no images of this split.
    """
    check_window(window)
    if path is None:
        raise InputError("dataset.path=null but NPZ data sets are read from a file; give dataset.path=FILE.npz")
    file = user_path(path)
    with _opened(file) as archive:
        name = _array_name(archive, split, image, file=file)
        if name is None:
            return None
        images = _pixels(_load(archive, name, file=file), f"{file}: {name}")
        rows = subsample_indices(len(images), limit)
        labels = None
        label_name = None if label is None else _array_name(archive, split, label, file=file)
        if label_name is not None:
            labels = _labels(_load(archive, label_name, file=file), len(images), f"{file}: {label_name}")[rows]
    if window is None and images.dtype != np.uint8:
        raise InputError(
            f"{file}: {name} has dtype {images.dtype} and values from {images.min():g} to {images.max():g}; set "
            "dataset.window=[LOWEST,HIGHEST], which become black and white"
        )
    if images.shape[1:] != (size, size, channels) or images.dtype != np.uint8:
        made = [
            to_array(Image.fromarray(each), channels=channels, size=size, window=window) for each in _gray(images[rows])
        ]
        tensor = torch.from_numpy(np.stack(made))
    else:
        tensor = torch.from_numpy(np.ascontiguousarray(images[rows].transpose(0, 3, 1, 2)))
    return ImageData(TensorImages(tensor), None if labels is None else torch.from_numpy(labels))


@contextmanager
def _opened(file: Path) -> Iterator[NpzFile]:
    """Open a file; errors of a damaged one, also inside the block, become an `InputError`.

    Encrypted members raise a RuntimeError, unknown compressions a NotImplementedError.
    """
    try:
        with open_regular_file(file) as stream, zipfile.ZipFile(stream):
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as archive:
                yield archive
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        reason = sanitize(getattr(error, "strerror", None) or error)[:200]
        raise InputError(
            f"dataset.path: {file} cannot be read as NPZ ({reason}); check the path, or download it again"
        ) from error


def _array_name(archive: NpzFile, split: str, part: str, *, file: Path) -> str | None:
    """Return the name of the array of a split; None if only other splits have one."""
    names = [name for name in archive.files if part in name.split("_")]
    if not names:
        found = sanitize(", ".join(archive.files[:20]))
        raise InputError(
            f"{file} has no array whose name contains {part!r} (it has {found}); set dataset.image and dataset.label "
            "to a part of their names, e.g. dataset.image=x for x_train, or dataset.label=null"
        )
    chosen = matching(split, names)
    if len(chosen) > 1:
        raise InputError(f"{file} has several arrays of the split {split!r}: {sanitize(', '.join(chosen))}; keep one")
    return chosen[0] if chosen else None


def _load(archive: NpzFile, name: str, *, file: Path) -> np.ndarray:
    """Read an array that fits into the memory; its header is read first."""
    assert archive.zip is not None  # it is open
    with archive.zip.open(f"{name}.npy") as stream:
        version = npy.read_magic(stream)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(stream)
    needed, free = dtype.itemsize * int(np.prod(shape, dtype=object)), available_memory()
    if free is not None and _SHARE * needed > free:
        raise InputError(
            f"{file}: {name} needs {gigabytes(needed)} of memory, more than half of the available {gigabytes(free)}; "
            "use smaller images, or save them as files and use dataset=image_folder"
        )
    array: np.ndarray = archive[name]
    return array


def _pixels(array: np.ndarray, name: str) -> np.ndarray:
    """Return images as ``(n, height, width, channels)``."""
    if array.ndim == 3:
        array = array[..., None]
    elif array.ndim == 4 and array.shape[3] not in _CHANNELS and array.shape[1] in _CHANNELS:
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[3] not in _CHANNELS or not array.size:
        raise InputError(
            f"{name} has shape {array.shape}; images are (n, height, width), or with 1 or 3 channels in front of or "
            "behind the height and width"
        )
    if array.dtype.kind not in "uif" or (array.shape[3] == 3 and array.dtype != np.uint8):
        raise InputError(f"{name} has dtype {array.dtype}; color images are uint8, gray ones integers or floats")
    return array


def _gray(images: np.ndarray) -> Iterator[np.ndarray]:
    """Yield images in a form that Pillow takes."""
    if images.dtype not in (np.uint8, np.uint16):
        images = images.astype(np.float32)
    return (each[..., 0] if each.shape[2] == 1 else each for each in images)


def _labels(array: np.ndarray, number: int, name: str) -> np.ndarray:
    """Return labels of ``number`` images, int64."""
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape != (number,) or array.dtype.kind not in "ui":
        raise InputError(
            f"{name} has shape {array.shape} and dtype {array.dtype}, but {number} images have one class each; set "
            "dataset.label=null for images with several labels"
        )
    return np.maximum(array.astype(np.int64), NO_LABEL)
