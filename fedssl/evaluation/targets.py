"""Targets of images other than one class: several labels, or numbers.

They are in columns of parquet and arrow files, in arrays of NPZ files, or in a CSV file. The first column of a CSV file
has the images' files, below the folder of the CSV file; if none is there, their names, with or without ending. An image
whose bands are files has the name of their folder. A row of a file is that of its pages without another (``a.tif[0]``).

A target is a number, and unknown if it is null, blank or NaN. A column with lists has a target for each place of the
list, or, for labels, for each class: lists of names or class numbers, of any length, or names between bars, of which
blank means none.
"""

import logging
import math
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedssl.config.literal import user_path
from fedssl.csv_file import check_line, read_lines
from fedssl.datasets.image_index import Place
from fedssl.datasets.page_index import PageIndex
from fedssl.errors import InputError, shortened
from fedssl.evaluation.labeled_images import LabeledImages
from fedssl.evaluation.protocol import EvaluationInput
from fedssl.logs import log_once

_REMEDY = "name other columns with evaluation.columns=[NAME,...]"
_BOOLS = {"true": 1.0, "false": 0.0}

Column = tuple[np.ndarray, tuple[str, ...]]  # targets, float64 ``(n, t)``, and their names
Convert = Callable[[str, Sequence[Any]], Column]


@dataclass(frozen=True)
class Targets:
    """Targets of the training and test images, NaN if unknown."""

    train: Tensor  # float64, ``(n_train, t)``
    test: Tensor  # float64, ``(n_test, t)``
    names: tuple[str, ...]  # of the ``t`` targets


def read_targets(
    evaluation_input: EvaluationInput, *, columns: Sequence[str] | None, file: str | None, convert: Convert
) -> Targets:
    """Read the targets of all images of an evaluation, in ``columns`` of the data set, or of a CSV ``file``; None: all.

    ``convert``, `as_numbers` or `as_labels`, maps the name and the values of a column of both splits to targets and
    their names.
    """
    if not columns and file is None:
        raise InputError(
            "evaluation.columns=null names no targets; set evaluation.columns=[NAME,...] to columns of the data set, "
            "or evaluation.file=FILE.csv, and likewise of final_evaluation"
        )
    splits = (evaluation_input.train, evaluation_input.test)
    if file is None:
        raw = {name: _of_data_set(splits, name) for name in columns or ()}
    else:
        raw = _read_csv(user_path(file), splits, columns)
    count, parts = len(splits[0].labels), []
    for name, values in raw.items():
        matrix, titles = convert(name, values)
        parts.append((matrix, titles if len(titles) > 1 else (name,)))
    targets = torch.from_numpy(np.concatenate([matrix for matrix, _ in parts], axis=1))
    if (bad := targets.isinf()).any():
        raise InputError(f"the targets {shortened(raw)} have {int(bad.sum())} infinite values; correct them")
    named = [(name, title) for name, (_, titles) in zip(raw, parts, strict=True) for title in titles]
    counts = Counter(title for _, title in named)  # columns may have the same classes
    titles = tuple(title if counts[title] == 1 else f"{name}: {title}" for name, title in named)
    return Targets(targets[:count], targets[count:], titles)


def varying(targets: Tensor) -> Tensor:
    """Return which columns of ``(n, t)`` have different known values, bool ``(t,)``."""
    lowest, highest = targets.nan_to_num(nan=math.inf).amin(dim=0), targets.nan_to_num(nan=-math.inf).amax(dim=0)
    return lowest < highest


def num_known(targets: Tensor) -> int:
    """Return the number of images of which a target is known, of targets ``(n, t)``."""
    return int((~targets.isnan()).any(dim=1).sum())


def as_numbers(name: str, values: Sequence[Any]) -> Column:
    """Convert numbers, or lists of equal length, to targets."""
    width = max((len(value) for value in values if _is_list(value)), default=1)
    rows = [list(value) if _is_list(value) else [value] * width if _is_unknown(value) else [value] for value in values]
    wrong = next((row for row in rows if len(row) != width), None)
    if wrong is not None:
        raise InputError(f"the column {name!r} has {width} and {len(wrong)} targets per image; {_REMEDY}")
    numbers = np.array([[_number(name, value) for value in row] for row in rows], dtype=np.float64)
    return numbers.reshape(len(rows), width), tuple(f"{name}_{number}" for number in range(width))


def as_labels(name: str, values: Sequence[Any]) -> Column:
    """Convert labels to 0, 1 or NaN for each class; -1 is unknown, too."""
    values = _split_at_bars(values, all_values=values)
    texts = (value for value in values if isinstance(value, str) and not _is_unknown(value))
    named = next((text for text in texts if _number_of(text) is None), None)
    if named is not None:
        raise InputError(
            f"the column {name!r} has the value {named[:40]!r}, but labels are 0, 1, and blank for unknown, or names "
            f"between bars, such as '{named[:40]}|' for one; {_REMEDY}"
        )
    lists = [value for value in values if _is_list(value)]
    if not lists or _are_indicators(lists):
        matrix, titles = as_numbers(name, values)
        matrix = np.where(matrix == -1, np.nan, matrix)
        wrong = matrix[~np.isin(matrix, (0, 1)) & ~np.isnan(matrix)]
        if len(wrong):
            raise InputError(
                f"the column {name!r} has the value {wrong[0]:g}, but labels are 0, 1, or null and -1 for unknown; "
                f"{_REMEDY}, or evaluation=regression"
            )
        return matrix, titles
    items = [[item.strip() if isinstance(item, str) else item for item in value] for value in lists]
    kinds = {type(item) for value in items for item in value}
    if len(kinds) > 1 or not kinds <= {str, int}:
        raise InputError(f"the column {name!r} has lists of other things than class names or numbers; {_REMEDY}")
    classes = sorted({item for value in items for item in value} - {""})
    if not classes:
        raise InputError(f"the column {name!r} names no class; {_REMEDY}")
    matrix = np.full((len(values), len(classes)), np.nan)
    known = np.array([_is_list(value) for value in values])
    matrix[known] = [[item in value for item in classes] for value in map(set, items)]
    return matrix, tuple(map(str, classes))


def _split_at_bars(values: Sequence[Any], *, all_values: Iterable[Any]) -> Sequence[Any]:
    """Split texts into names if one of ``all_values``, also of images that are not used, has bars."""
    if not any(isinstance(value, str) and "|" in value for value in all_values):
        return values
    return [value.split("|") if isinstance(value, str) else value for value in values]


def _are_indicators(lists: Sequence[Sequence[Any]]) -> bool:
    """Return whether lists have a place for each class, not the numbers or names of classes."""
    items = {item for value in lists for item in value}
    same_length = len({len(value) for value in lists}) == 1
    return any(isinstance(item, float) for item in items) or (same_length and items <= {None, 0, 1, -1})


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _is_unknown(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _number(name: str, value: Any) -> float:
    if _is_unknown(value):
        return math.nan
    number = _number_of(value)
    if number is None:
        decimal = "write decimal points, or " if "," in str(value) else ""
        raise InputError(
            f"the column {name!r} has the value {str(value)[:40]!r}, but targets are numbers; {decimal}{_REMEDY}"
        )
    return number


def _number_of(value: Any) -> float | None:
    """Return a value as a number; None if it is none, such as ``3_5``, which Python reads as 35."""
    try:
        text = value.strip().lower() if isinstance(value, str) else value
        return None if isinstance(text, str) and "_" in text else float(_BOOLS.get(text, text))
    except (TypeError, ValueError):
        return None


def _of_data_set(splits: Sequence[LabeledImages], name: str) -> Sequence[Any]:
    """Return a column of the data set, of the images of all splits."""
    columns = [_column(images, name) for images in splits]
    values = [values[row] for values, rows in columns for row in rows]
    plain = [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in values]
    return _split_at_bars(plain, all_values=chain.from_iterable(values for values, _ in columns))


def _column(images: LabeledImages, name: str) -> tuple[Sequence[Any], np.ndarray]:
    """Return a column of the data set, and the rows of images."""
    if images.origin is None:
        raise InputError(
            f"evaluation.columns={name} but the data set has no columns; give parquet files or a CSV list of the "
            "images in dataset.path, or evaluation.file=FILE.csv"
        )
    index, rows = images.origin
    return index.values(name), rows


def _read_csv(file: Path, splits: Sequence[LabeledImages], columns: Sequence[str] | None) -> dict[str, Sequence[Any]]:
    """Return columns of a CSV file, of the images of all splits, None for those that it does not have."""
    setting = f"evaluation.file={file}"
    header, lines = read_lines(file, setting=setting, content="with the targets of the images")
    for number, row in enumerate(lines, start=2):
        if row:
            check_line(f"{setting}, line {number}", row, header)
    lines = list(filter(None, lines))
    others = header[1:]
    missing = [name for name in columns or () if name not in others]
    if missing or not others:
        raise InputError(f"{file} has no column {shortened(missing)} after the first; it has {others}")
    table = _by_image(file, [row[0].strip() for row in lines], splits)
    found = list[int | None]()
    for split, images in zip(("training", "test"), splits, strict=True):
        places = _places(images)
        numbers = [table.get(place.name) for place in places]
        found += numbers
        unknown = numbers.count(None)
        if unknown == len(numbers):
            raise InputError(
                f"{file} has no row of the {len(numbers)} {split} images; write their paths or names into its first "
                f"column, such as {places[0].name if places else 'a.png'}"
            )
        if unknown:
            log_once(logging.WARNING, f"{file} has no row for {unknown} of {len(numbers)} {split} images: not used")
    whole = {name: [line[1 + others.index(name)] for line in lines] for name in columns or others}
    return {
        name: _split_at_bars([None if row is None else values[row] for row in found], all_values=values)
        for name, values in whole.items()
    }


def _by_image(file: Path, names: Sequence[str], splits: Sequence[LabeledImages]) -> Mapping[str, int]:
    """Return the row of each image that a CSV file names: by its path, or else by its name; by its page first."""
    places = [place for split in splits for place in _places(split)]
    names = [name if "/" in name else name.replace("\\", "/") for name in names]  # as Windows writes them
    paths = [_normal((file.parent / name).absolute()) for name in names]
    counts = Counter(paths)
    twice = dict.fromkeys(name for name, path in zip(names, paths, strict=True) if counts[path] > 1)
    if twice:
        raise InputError(f"{file} has several rows of {shortened(twice)}; keep one row per image")
    by_path = {path: row for row, path in enumerate(paths)}
    of_path = {place.name: by_path.get(place.name, by_path.get(str(place.file), -1)) for place in places}
    if max(of_path.values(), default=-1) >= 0:
        return {image: row for image, row in of_path.items() if row >= 0}
    by_name, by_stem = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for row, name in enumerate(names):
        name = _normal(Path(name))
        by_name[Path(name).name].append(row)
        if not name.endswith("]"):  # a page is not its file
            by_stem[Path(name).stem].append(row)
    found = dict[str, list[int]]()
    for place in places:
        path = Path(place.file)
        of_file = by_name[path.name] or by_name[path.stem] or by_stem[path.stem]
        found[place.name] = by_name[Path(place.name).name] or of_file
    uses = Counter(row for row, _ in {(row, place.file) for place in places for row in found[place.name]})
    repeated = {names[rows[0]]: None for rows in found.values() if len(rows) > 1 or any(uses[row] > 1 for row in rows)}
    if repeated:
        raise InputError(
            f"several images or rows have the names {shortened(repeated)} of {file}; give paths from its folder"
        )
    return {image: rows[0] for image, rows in found.items() if rows}


def _places(images: LabeledImages) -> list[Place]:
    """Return the files of images, with the numbers of their pages."""
    if images.origin is None:
        raise InputError("evaluation.file is for images in files, which the data set has none of")
    index, rows = images.origin
    order = np.argsort(rows, kind="stable")
    sorted_places = index.places(np.asarray(rows)[order])
    places = [sorted_places[place] for place in np.argsort(order)]
    if not isinstance(index, PageIndex):  # the part is a row of a table, which is one image
        places = [Place(place.name) for place in places]
    return [Place(_normal(Path(place.file).absolute()), place.part) for place in places]


def _normal(path: Path) -> str:
    """Return a path for comparisons: macOS writes the letters of names and their accents one by one."""
    return unicodedata.normalize("NFC", os.path.normpath(path))
