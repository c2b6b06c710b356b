"""Several NPZ files as one data set, and one as `fedssl.datasets.npz` reads it.

Each of several files has one array of images. A file belongs to the split that its name names, see
`fedssl.datasets.split_files`, and with ``folders=owner`` to one owner.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.image_index import Query, SequenceIndex
from fedssl.datasets.labels import LabelColumn, joined
from fedssl.datasets.npz import ArrayImages, ArrayIndex, index_file
from fedssl.datasets.sources import Source
from fedssl.datasets.split_files import files_of_split, has_held_out, training_files
from fedssl.datasets.splits import HELD_OUT, is_held_out_of, split_of_word


def index_arrays(source: Source, query: Query) -> SequenceIndex | None:
    """Return the images of one or several files; None if there are none of the split."""
    files = sorted(source.files)
    if len(files) == 1:
        return index_file(source, files[0], query)
    kind = split_of_word(query.split)
    shared = query.test_fraction > 0 and not has_held_out(source)
    wanted = "train" if shared and kind in HELD_OUT else query.split
    train, chosen = files, files
    if query.split_folders is not False:
        train, chosen = training_files(source), files_of_split(source, wanted)
    parts = {file: part for file in files if (part := index_file(source, file, query, is_alone=False))}
    columns = {}
    for file, part in parts.items():
        labels = np.full(part.count, NO_LABEL) if part.labels is None else part.labels
        columns[file] = LabelColumn(file, labels, part.classes or None)
    by_file, classes = joined(columns, query.label or "")
    labels = np.concatenate([by_file[file] for file in chosen] or [np.empty(0, np.int64)])
    is_labeled = bool((labels != NO_LABEL).any())
    if not chosen:
        return None
    return replace(
        _merged([parts[file] for file in chosen]),
        labels=labels if is_labeled else None,
        classes=classes if is_labeled else (),
        shared=shared and is_held_out_of(chosen, train, split=query.split, fraction=query.test_fraction),
    )


def _merged(parts: Sequence[ArrayIndex]) -> ArrayIndex:
    """Return the images of several files as those of one index, without labels."""
    count = sum(part.count for part in parts)
    owners, owner_names = _joined_names([(part.owners, part.owner_names) for part in parts])
    groups, group_names = _joined_names([(part.groups, part.group_names) for part in parts])
    return replace(
        parts[0],
        count=count,
        files=[file for part in parts for file in part.files],
        num_in_files=count,
        key={"reader": "npz", "image": [part.key["image"] for part in parts]},
        images=ArrayImages(
            [array for part in parts for array in part.images.arrays],
            np.repeat(np.arange(len(parts)), [part.count for part in parts]),
            np.concatenate([np.arange(part.count) for part in parts]),
            channels=parts[0].decoding.channels,
        ),
        owners=owners,
        owner_names=owner_names,
        groups=groups,
        group_names=group_names,
        warnings=tuple(warning for part in parts for warning in part.warnings),
    )


def _joined_names(
    columns: Sequence[tuple[np.ndarray | None, Sequence[str]]],
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return the numbers and the names of owners or groups of several files; None if one has none."""
    values = [np.array(names)[numbers] for numbers, names in columns if numbers is not None]
    if len(values) < len(columns):
        return None, ()
    found, numbers = np.unique(np.concatenate(values), return_inverse=True)
    return numbers, tuple(found.tolist())
