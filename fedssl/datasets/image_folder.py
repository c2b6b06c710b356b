"""Images in a folder: gray, RGB, RGBA or palette, of any size, with or without classes and owners.

``DIR`` holds images without classes and owners, subfolders of images, or the folders of splits with either layout, see
`fedssl.datasets.folder_layout`. The setting ``folders`` gives the meaning of a subfolder:

==============  =========================  ==========================================================
``class``       ``DIR/cat/1.png``          the class of its images
``owner``       ``DIR/phone-7/1.png``      the owner of its images, which have no labels
``owner/class`` ``DIR/phone-7/cat/1.png``  the owner of its images; its subfolders are the classes
``none``        ``DIR/2024/may/1.png``     none: all images below DIR, without labels
==============  =========================  ==========================================================

Images are sorted by path.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.config.constraints import check_arguments
from fedssl.config.literal import user_path
from fedssl.datasets.base import ImageData, subsample_indices
from fedssl.datasets.cache import file_line, read_images
from fedssl.datasets.decoding import MAX_PIXELS, Decoding, Encoded
from fedssl.datasets.folder_layout import list_images, list_split
from fedssl.datasets.image_index import ImageIndex
from fedssl.datasets.pixels import BACKGROUND
from fedssl.datasets.sample_checks import SAMPLE
from fedssl.digests import new_identity
from fedssl.errors import InputError

# Arguments of `read` for all images below a folder, without labels, as on a device.
ALL_IMAGES: Mapping[str, Any] = {"folders": "none", "split_folders": False, "test_fraction": 0.0}
_BATCH = 16  # images per task of a decoding thread; small, since images may be large


def read(
    split: str,
    *,
    channels: int,
    size: int,
    limit: int | None,
    path: str | None,
    folders: str = "class",
    split_folders: bool | str = "auto",
    test_fraction: float,
    background: int = BACKGROUND,
    window: Sequence[float] | None = None,
    max_pixels: int = MAX_PIXELS,
    cache: str | None = None,
    storage: str = "decoded",
) -> ImageData | None:
    """Read the split "train" or "test".

    Parameters
    ----------
    split : str
        Name of a split's folder, or a word for it. Without folders of a test or validation split, labeled images are
        split into "train" and "test" by ``test_fraction``; unlabeled images have no test split.
    channels, size, background, window
        As in `fedssl.datasets.pixels.to_array`.
    limit : int or None
        Maximum number of images; the subset is always the same.
    path : str
        The folder.
    folders : {"class", "owner", "owner/class", "none"}
        Meaning of the subfolders, see the module.
    split_folders : bool or "auto"
        Whether the folders in ``path`` are splits; "auto" decides by their names.
    test_fraction : float
        Share of every class held out for the test, in [0, 1); 0 holds nothing out.
    max_pixels : int
        Maximum number of pixels of an image; larger images count as unreadable.
    cache : str or None
        Folder of decoded images, see `fedssl.datasets.cache`.
    storage : {"decoded", "encoded", "auto"}
        See `fedssl.datasets.cache.read_images`. Encoded images stay in their files.

    Returns
    -------
    ImageData or None
        None if there is no such split.
    """
    if path is None:
        raise InputError("dataset.path=null but image_folder needs a folder of images; give dataset.path=FOLDER")
    check_arguments(
        "dataset", folders=folders, split_folders=split_folders, test_fraction=test_fraction, storage=storage
    )
    decoding = Decoding(channels=channels, size=size, background=background, window=window, max_pixels=max_pixels)
    root = user_path(path)
    file_list = list_split(split, root, folders=folders, split_folders=split_folders, test_fraction=test_fraction)
    if file_list is None or not file_list.files:
        return None
    file_list = file_list.at(subsample_indices(len(file_list.files), limit))
    index = FolderIndex(
        name=f"{Path(path).name}-{split}-{size}px",
        count=len(file_list.files),
        num_in_files=len(file_list.files),
        decoding=decoding,
        key={"reader": "image_folder"},
        **vars(file_list),
    )
    return read_images(index, cache=cache, storage=storage)


class FolderIndex(ImageIndex):
    """Images in their own files."""

    def batches(self, start: int) -> Iterator[Sequence[Encoded]]:
        return (self.files[first : first + _BATCH] for first in range(start, self.count, _BATCH))

    def sample(self, readable: np.ndarray) -> Iterable[Encoded]:
        return self.files[:: math.ceil(self.count / SAMPLE)]

    def image_name(self, index: int) -> str:
        return str(self.files[index])

    def records(self) -> Sequence[Encoded]:
        return self.files


def count_files(path: Path) -> int:
    """Return the number of all images below a folder."""
    return len(list_images(path))


def files_digest(path: Path) -> str:
    """Return a digest of the names, sizes and modification times of all images below a folder."""
    hashed = new_identity()
    for file in list_images(path):
        hashed.update(file_line(file)[0])
    return hashed.hexdigest()
