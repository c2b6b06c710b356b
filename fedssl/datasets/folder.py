"""Images of a path: in files, in the rows of parquet and arrow files, or in the arrays of an NPZ file.

``DIR`` holds images without classes and owners, subfolders of images, or the folders of splits with either layout, see
`fedssl.datasets.folder_layout`. The setting ``folders`` gives the meaning of a subfolder:

==============  =========================  ==========================================================
``class``       ``DIR/cat/1.png``          the class of its images
``owner``       ``DIR/phone-7/1.png``      the owner of its images, which have no labels
``owner/class`` ``DIR/phone-7/cat/1.png``  the owner of its images; its subfolders are the classes
``none``        ``DIR/2024/may/1.png``     none: all images below DIR, without labels
==============  =========================  ==========================================================

Images are sorted by path. The other kinds are described in `fedssl.datasets.table_index` and `fedssl.datasets.npz`.
"""

from collections.abc import Sequence
from pathlib import Path

from fedssl.config.constraints import check_arguments
from fedssl.datasets.base import ImageData, subsample_indices
from fedssl.datasets.cache import read_images
from fedssl.datasets.decoding import MAX_PIXELS, Decoding
from fedssl.datasets.image_index import Query
from fedssl.datasets.path_index import index_path
from fedssl.datasets.raster import BACKGROUND
from fedssl.datasets.table_index import index_hub
from fedssl.errors import InputError


def read(
    split: str,
    *,
    channels: int,
    size: int,
    limit: int | None,
    path: str | None,
    hub: str | None = None,
    image: str | None = None,
    label: str | None = "label",
    owner: str | None = None,
    group: str | None = None,
    split_column: str | None = None,
    skip_missing: bool = True,
    folders: str = "class",
    split_folders: bool | str = "auto",
    test_fraction: float = 0.0,
    pages: str = "auto",
    background: int = BACKGROUND,
    dtype: str = "auto",
    window: Sequence[float] | None = None,
    percentiles: Sequence[float] | None = None,
    max_pixels: int = MAX_PIXELS,
    video_interval: float = 1.0,
    cache: str | None = None,
    storage: str = "decoded",
) -> ImageData | None:
    """Read one split.

    Parameters
    ----------
    split : str
        Name of the split on the Hub, or in the names of folders, files, or arrays; or a word for it.
    pages : {"auto", "first", "all", "channels"}
        The images of files with several, see `fedssl.datasets.page_index`.
    channels, size, background, dtype, window, percentiles
        See `fedssl.datasets.raster.PixelSettings`.
    limit : int or None
        Maximum number of images; the subset is always the same.
    path : str or None
        A file, a folder or a pattern such as ``/data/cifar10-*.parquet``; the network is not used. None for the Hub.
    hub : str or None
        Name of the data set on the Hub, with the name of its subset behind a colon, if it has several.
    image : str or None
        Name of the column of images, or part of the name of the arrays. None for the only one.
    label : str or None
        Name of the column or arrays of labels, see `fedssl.datasets.labels`. None for no labels, also of folders.
    owner : str or None
        Name of the column with the owner of each image, as an integer or a string. None if unknown.
    group : str or None
        Name of the column with the group of each image, such as a patient, as an integer or a string; "folder" for the
        folder of its file. Images of one group are on one side of the holdout. None for no groups.
    split_column : str or None
        Name of the column with the split of each image, if all files have it. None for none.
    skip_missing : bool
        Whether image files that a column names and that do not exist are a warning; otherwise they are an error.
    folders : {"class", "owner", "owner/class", "domain", "domain/class", "none"}
        Meaning of the subfolders, see the module. A domain is an owner.
    split_folders : bool or "auto"
        Whether the folders in ``path`` are splits; "auto" decides by their names. False reads the files of all splits.
    test_fraction : float
        Share of every class that is held out if there are labels, but no test or validation split, in [0, 1);
        0 holds nothing out.
    max_pixels : int
        Maximum number of pixels of an image; larger images count as unreadable.
    video_interval : float
        Seconds between two frames of a video.
    cache : str or None
        Folder of decoded images, see `fedssl.datasets.cache`.
    storage : {"decoded", "encoded", "auto"}
        See `fedssl.datasets.cache.read_images`. Encoded images stay in their files.

    Returns
    -------
    ImageData or None
        None if there is no such split.
    """
    check_arguments("dataset", folders=folders, split_folders=split_folders, test_fraction=test_fraction)
    check_arguments("dataset", storage=storage, pages=pages)
    query = Query(
        split=split,
        name=f"{hub if path is None else Path(path).name}-{split}-{size}px",
        decoding=Decoding(
            channels=channels,
            size=size,
            background=background,
            dtype=dtype,
            window=window,
            percentiles=percentiles,
            max_pixels=max_pixels,
            video_interval=video_interval,
        ),
        image=image,
        label=label,
        owner=owner,
        group=group,
        split_column=split_column,
        skip_missing=skip_missing,
        folders=folders.replace("domain", "owner"),
        split_folders=split_folders,
        test_fraction=test_fraction,
        pages=pages,
    )
    if path is not None:
        index = index_path(path, query, containers_first=hub is not None)
    elif hub is not None:
        index = index_hub(hub, query)
    else:
        raise InputError("dataset.path=null but there is no data set without one; give dataset.path=FOLDER_OR_FILE")
    if index is None:
        return None
    return read_images(index.at(subsample_indices(index.count, limit)), cache=cache, storage=storage)
