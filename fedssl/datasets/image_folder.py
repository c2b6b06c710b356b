"""Images in a folder: gray, RGB, RGBA or palette, of any size, with or without classes and owners.

``DIR`` holds images without classes and owners, subfolders of images, or the folders ``train`` and ``test`` with
either layout. The setting ``folders`` gives the meaning of a subfolder:

==============  =========================  ==========================================================
``class``       ``DIR/cat/1.png``          the class of its images
``owner``       ``DIR/phone-7/1.png``      the owner of its images, which have no labels
``owner/class`` ``DIR/phone-7/cat/1.png``  the owner of its images; its subfolders are the classes
==============  =========================  ==========================================================

Images are sorted by path.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedssl.config.constraints import check_arguments
from fedssl.datasets.base import ImageData, stratified_holdout, subsample_indices
from fedssl.datasets.buffers import EncodedInput
from fedssl.datasets.cache import CacheKey, open_buffer
from fedssl.datasets.decoding import MAX_PIXELS, Decoding, decode, unreadable_summary
from fedssl.datasets.images import ImageSource
from fedssl.datasets.pixels import BACKGROUND
from fedssl.datasets.sample_checks import SAMPLE, range_warnings
from fedssl.errors import InputError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_BATCH = 16  # images per task of a decoding thread; small, since images may be large


@dataclass(frozen=True)
class FileList:
    """Image files with the classes and owners of their folders; see `ImageData` for the fields."""

    files: list[Path]
    labels: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    owners: np.ndarray | None = None
    owner_names: tuple[str, ...] = ()

    def at(self, indices: np.ndarray) -> "FileList":
        labels, owners = (None if column is None else column[indices] for column in (self.labels, self.owners))
        return FileList([self.files[index] for index in indices], labels, self.classes, owners, self.owner_names)


def read(
    split: str,
    *,
    channels: int,
    size: int,
    limit: int | None,
    path: str | None,
    folders: str = "class",
    test_fraction: float,
    background: int = BACKGROUND,
    max_value: float | None = None,
    max_pixels: int = MAX_PIXELS,
    cache: str | None = None,
    storage: str = "decoded",
) -> ImageData | None:
    """Read the split "train" or "test".

    Parameters
    ----------
    split : {"train", "test"}
        Without a folder ``test``, labeled images are split by ``test_fraction``; unlabeled images have no test split.
    channels, size, background, max_value
        As in `fedssl.datasets.pixels.to_array`.
    limit : int or None
        Maximum number of images; the subset is always the same.
    path : str
        The folder.
    folders : {"class", "owner", "owner/class"}
        Meaning of the subfolders, see the module.
    test_fraction : float
        Share of every class held out for the test, in [0, 1); 0 holds nothing out.
    max_pixels : int
        Maximum number of pixels of an image; larger images count as unreadable.
    cache : str or None
        Folder of decoded images, see `fedssl.datasets.cache`.
    storage : {"decoded", "encoded", "auto"}
        See `fedssl.datasets.cache.open_buffer`. Encoded images stay in their files.

    Returns
    -------
    ImageData or None
        None if there is no such split.
    """
    if path is None:
        raise InputError("dataset.path=null but image_folder needs a folder of images; give dataset.path=FOLDER")
    check_arguments("dataset", folders=folders, test_fraction=test_fraction, storage=storage)
    decoding = Decoding(channels=channels, size=size, background=background, max_value=max_value, max_pixels=max_pixels)
    file_list = _of_split(split, Path(path).expanduser(), folders=folders, test_fraction=test_fraction)
    if file_list is None or not file_list.files:
        return None
    file_list = file_list.at(subsample_indices(len(file_list.files), limit))

    files, count = file_list.files, len(file_list.files)
    cache_key = CacheKey(
        name=f"{Path(path).name}-{split}-{size}px",
        files=files,
        num_images=count,
        settings={"reader": "image_folder", "folders": folders, "root": path}
        | vars(decoding)
        | {"classes": file_list.classes, "owners": file_list.owner_names},
    )
    shape = (count, channels, size, size)
    in_files = EncodedInput(records=files, num_bytes=0, decoding=decoding)
    with open_buffer(cache, cache_key, shape, storage=storage, encoded=lambda: in_files) as buffer:
        if not buffer.complete:
            batches = (files[start : start + _BATCH] for start in range(buffer.done, count, _BATCH))
            decode(batches, buffer, decoding)
        warnings = unreadable_summary(buffer.unreadable, lambda index: str(files[index]), count=count)
    warnings += range_warnings(files[:: math.ceil(count / SAMPLE)], decoding)
    return _image_data(buffer.source, file_list.at(buffer.readable), warnings)


def count_files(path: Path, *, folders: str) -> int:
    """Return the number of files of the training images without a holdout."""
    file_list = _of_split("train", path, folders=folders, test_fraction=0.0)
    return len(file_list.files) if file_list else 0


def files_digest(path: Path, *, folders: str) -> str:
    """Return a digest of the names, sizes and modification times of the training images without a holdout."""
    file_list = _of_split("train", path, folders=folders, test_fraction=0.0)
    hashed = hashlib.sha256()
    for file in file_list.files if file_list else ():
        status = file.stat()
        hashed.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return hashed.hexdigest()


def _of_split(split: str, root: Path, *, folders: str, test_fraction: float) -> FileList | None:
    """List the files of one split, from its folder or by `stratified_holdout`; None if there is none."""
    train_folder, test_folder = root / "train", root / "test"
    if train_folder.is_dir():
        others = [entry.name for entry in root.iterdir() if entry.is_dir() and entry.name not in ("train", "test")]
        if others:
            listed = ", ".join(sorted(others))
            raise InputError(f"{root} has the folder train beside {listed}; move either of them")
        train = list_images(train_folder, folders=folders)
        if test_folder.is_dir():
            return _with_same_classes(test_folder, train_folder, train, folders) if split == "test" else train
    else:
        train = list_images(root, folders=folders)
    if train.labels is not None:
        return train.at(stratified_holdout(train.labels, fraction=test_fraction)[split == "test"])
    return None if split == "test" else train


def _with_same_classes(folder: Path, other: Path, file_list: FileList, folders: str) -> FileList:
    """List the files of ``folder``; its classes must equal those of ``file_list``, the files of ``other``."""
    test = list_images(folder, folders=folders)
    if test.classes != file_list.classes:
        raise InputError(
            f"{folder} has the classes {list(test.classes)} but {other} has {list(file_list.classes)}; "
            "give both the same subfolders"
        )
    return test


def list_images(folder: Path, *, folders: str = "class") -> FileList:
    """List the image files of a folder, sorted by path; without labels and owners if there is no subfolder."""
    if not folder.is_dir():
        raise InputError(f"dataset.path: {folder} is not a folder; give the folder that holds your images")
    levels = folders.split("/")
    loose, nested = _images_in(folder), _images_in_subfolders(folder, levels, folders)
    if loose and not nested and folders == "class":
        return FileList(loose)
    if loose:
        raise _layout_error(folder, loose, nested, levels[0], folders)
    if not nested:
        raise InputError(f"{folder} holds no image; allowed are files ending in {' '.join(SUFFIXES)}")
    files = [file for _, file in nested]
    columns = zip(levels, zip(*(names for names, _ in nested), strict=True), strict=True)
    numbered = {level: np.unique(names, return_inverse=True) for level, names in columns}
    classes, labels = numbered.get("class", ((), None))
    owner_names, owners = numbered.get("owner", ((), None))
    return FileList(files, labels, tuple(map(str, classes)), owners, tuple(map(str, owner_names)))


def _images_in_subfolders(folder: Path, levels: Sequence[str], folders: str) -> list[tuple[tuple[str, ...], Path]]:
    """List images in subfolders of ``folder``, each with the names of its subfolders, one per level."""
    if not levels:
        return [((), file) for file in sorted(folder.rglob("*")) if _is_image(file)]
    images = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            inner = _images_in_subfolders(entry, levels[1:], folders)
            loose = _images_in(entry) if len(levels) > 1 else []
            if loose:
                raise _layout_error(entry, loose, inner, levels[1], folders)
            images += [((entry.name, *names), file) for names, file in inner]
    return images


def _layout_error(
    folder: Path, loose: Sequence[Path], nested: Sequence[tuple[tuple[str, ...], Path]], level: str, folders: str
) -> InputError:
    """Make the error for the images ``loose`` in ``folder``, beside or in place of subfolders with ``nested``."""
    names = list(dict.fromkeys(names[0] for names, _ in nested))
    beside = f"beside the subfolders {names}" if names else f"but dataset.folders={folders} needs subfolders there"
    no_labels = {"class": "all images into one folder", "owner/class": "give dataset.folders=owner"}
    otherwise = f", or {no_labels[folders]} for no labels" if level == "class" else ""
    return InputError(
        f"{folder} holds {len(loose)} loose images {beside}; move them into a subfolder (one per {level}){otherwise}"
    )


def _images_in(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if _is_image(entry))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _image_data(images: ImageSource, file_list: FileList, warnings: tuple[str, ...]) -> ImageData:
    labels, owners = (
        None if column is None else torch.from_numpy(column) for column in (file_list.labels, file_list.owners)
    )
    return ImageData(images, labels, file_list.classes, owners, file_list.owner_names, warnings)
