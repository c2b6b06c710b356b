"""One's own pictures in a folder: grey, RGB, RGBA or palette, of any size, with or without labels.

``DIR`` holds pictures (no labels) or one subfolder per class; or it holds ``train`` and ``test``, each in either form.
Pictures are taken in the order of their sorted paths.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from fedssl.datasets.base import Pictures, choose, hold_out
from fedssl.datasets.decoding import decode
from fedssl.errors import InputError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_BATCH = 16  # pictures per task of a decoding thread; few, as they may be large
_NAMED = 5  # unreadable files that the warning names

logger = logging.getLogger(__name__)


def read(
    split: str, *, channels: int, size: int, limit: int | None, path: str | None, test_fraction: float
) -> Pictures | None:
    """Read the split "train" or "test".

    Parameters
    ----------
    split : {"train", "test"}
        Without a folder ``test``, labelled pictures are divided by `test_fraction`; unlabelled ones have no test.
    channels, size : int
        Form of the decoded pictures.
    limit : int or None
        Use only so many pictures, always the same ones.
    path : str
        The folder.
    test_fraction : float
        Share of every class that is held out, in [0, 1); 0 holds nothing out.

    Returns
    -------
    Pictures or None
        None if there is no such split.

    Raises
    ------
    InputError
        If the folder cannot be used or no picture in it can be read.
    """
    if path is None:
        raise InputError("dataset.path=null but image_folder needs your pictures; give dataset.path=FOLDER")
    if not 0 <= test_fraction < 1:
        raise InputError(f"dataset.test_fraction={test_fraction} must be at least 0 and below 1; 0 holds nothing out")
    root = Path(path).expanduser()
    train_folder = root / "train" if (root / "train").is_dir() else root
    if train_folder != root:
        others = [entry.name for entry in root.iterdir() if entry.is_dir() and entry.name not in ("train", "test")]
        if others:
            listed = ", ".join(sorted(others))
            raise InputError(f"{root} has the folder train beside {listed}; move one or the other")

    files, labels, classes = list_pictures(train_folder)
    test_folder = root / "test"
    if train_folder != root and test_folder.is_dir():
        if split == "test":
            files, labels, test_classes = list_pictures(test_folder)
            if test_classes != classes:
                raise InputError(
                    f"{test_folder} has the classes {list(test_classes)} but {train_folder} has {list(classes)}; "
                    "give both the same subfolders"
                )
    elif labels is not None:
        kept = hold_out(labels, fraction=test_fraction)[split == "test"]
        files, labels = [files[position] for position in kept], labels[kept]
    elif split == "test":
        return None
    if not files:
        return None
    chosen = choose(len(files), limit)
    return _decoded(
        [files[position] for position in chosen],
        None if labels is None else labels[chosen],
        classes,
        channels=channels,
        size=size,
    )


def list_pictures(folder: Path) -> tuple[list[Path], np.ndarray | None, tuple[str, ...]]:
    """Sorted picture files of ``folder``, their labels ``(n,)`` and the classes; labels only with subfolders.

    Raises
    ------
    InputError
        If the folder does not exist, is empty, or mixes loose pictures with folders of pictures.
    """
    if not folder.is_dir():
        raise InputError(f"dataset.path: {folder} is not a folder; give the folder that holds your pictures")
    loose = sorted(entry for entry in folder.iterdir() if _is_picture(entry))
    by_class = {
        entry.name: sorted(file for file in entry.rglob("*") if _is_picture(file))
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and not entry.name.startswith(".")
    }
    by_class = {name: files for name, files in by_class.items() if files}
    if loose and by_class:
        raise InputError(
            f"{folder} holds {len(loose)} loose pictures beside the subfolders {list(by_class)}; "
            "move them into a subfolder (one per class), or all pictures into one folder for no labels"
        )
    if loose:
        return loose, None, ()
    if not by_class:
        raise InputError(f"{folder} holds no picture; allowed are files ending in {' '.join(SUFFIXES)}")
    labels = np.repeat(np.arange(len(by_class)), [len(files) for files in by_class.values()])
    return [file for files in by_class.values() for file in files], labels, tuple(by_class)


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _decoded(
    files: list[Path], labels: np.ndarray | None, classes: tuple[str, ...], *, channels: int, size: int
) -> Pictures:
    """Decode ``files``; unreadable ones are counted and named in one warning and left out."""
    images, unreadable = decode(_batches(files), count=len(files), channels=channels, size=size)
    if unreadable:
        named = "; ".join(f"{files[position]} ({reason})" for position, reason in list(unreadable.items())[:_NAMED])
        named += f"; and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
        if len(unreadable) == len(files):
            raise InputError(f"none of the {len(files)} pictures can be read: {named}; check dataset.path")
        logger.warning("%d of %d pictures cannot be read, the rest is used: %s", len(unreadable), len(files), named)
        kept = np.delete(np.arange(len(files)), list(unreadable))
        images, labels = images[torch.from_numpy(kept)], None if labels is None else labels[kept]
    return Pictures(images, None if labels is None else torch.from_numpy(labels), classes)


def _batches(files: list[Path]) -> Iterator[list[Path]]:
    for start in range(0, len(files), _BATCH):
        yield files[start : start + _BATCH]
