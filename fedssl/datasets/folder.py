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
from fedssl.config.literal import user_path
from fedssl.datasets.base import ImageData, subsample_indices
from fedssl.datasets.cache import read_images
from fedssl.datasets.decoding import MAX_PIXELS, Decoding
from fedssl.datasets.image_index import ImageIndex, Query
from fedssl.datasets.listing import is_folder
from fedssl.datasets.path_index import index_path
from fedssl.datasets.raster import BACKGROUND
from fedssl.datasets.sources import NoImagesError
from fedssl.datasets.table_index import index_hub
from fedssl.datasets.torchvision_files import class_of, index_torchvision, root_of
from fedssl.errors import InputError


def read(
    split: str,
    *,
    channels: int,
    size: int,
    limit: int | None,
    path: str | None,
    hub: str | None = None,
    torchvision: str | None = None,
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
    """Read one split; None if there is no such split.

    ``split`` is its name on the Hub, or in the names of folders, files, or arrays; or a word for it. ``hub`` is the
    name of the data set on the Hub, with that of its subset behind a colon, if it has several. With a ``path``, such as
    a copy of the repository, the network is not used. It may be the root of the class ``torchvision`` of
    `torchvision.datasets`, and must be if there is no ``hub``. The other arguments are the settings of
    ``dataset=folder``.
    """
    check_arguments("dataset", folders=folders, split_folders=split_folders, test_fraction=test_fraction)
    check_arguments("dataset", storage=storage, pages=pages)
    subset = (hub or "").partition(":")[2]
    if path is not None and subset and is_folder(user_path(path) / subset):  # a copy of the repository
        path = f"{path}/{subset}"
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
    root = None
    if path is not None and torchvision is not None:
        root = root_of(path, torchvision, required=hub is None)
    if root is not None and torchvision is not None:
        index: ImageIndex | None = index_torchvision(root, torchvision, query)
    elif path is not None:
        index = _index_path(path, query, is_of_hub=hub is not None)
    elif hub is not None:
        index = index_hub(hub, query)
    else:
        raise InputError("dataset.path=null but there is no data set without one; give dataset.path=FOLDER_OR_FILE")
    if index is None:
        return None
    return read_images(index.at(subsample_indices(index.count, limit)), cache=cache, storage=storage)


def _index_path(path: str, query: Query, *, is_of_hub: bool) -> ImageIndex | None:
    try:
        return index_path(path, query, containers_first=is_of_hub)
    except NoImagesError as error:
        if (name := class_of(path)) is None:
            raise
        remedy = f"these are files of torchvision's {name}: " + (
            "choose its data set" if is_of_hub else f"set dataset.torchvision={name}"
        )
        raise InputError(f"{error}; {remedy}") from error
