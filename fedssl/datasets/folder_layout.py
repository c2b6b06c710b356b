"""Meaning of the folders below a folder of images: splits, owners and classes.

- Subfolders are splits if all are named after splits, see `fedssl.datasets.splits`; the setting ``split_folders``
  overrides this. Subfolders without images do not count.
- If all images are in one subfolder, which only has subfolders, then these are meant.
- Classes are those of all splits, in the order of their names as text. With a single one there are no labels.
- A list in the folder of a split names the classes of its images, see `fedssl.datasets.manifest.listed_classes`.
"""

import logging
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, takewhile
from pathlib import Path

import numpy as np

from fedssl.datasets.formats import FORMAT_OF, is_zarr
from fedssl.datasets.image_index import Query, SequenceIndex
from fedssl.datasets.listing import Listing, ending_of
from fedssl.datasets.manifest import listed_classes
from fedssl.datasets.sources import Source
from fedssl.datasets.splits import HELD_OUT, domain_of, is_held_out_of, matching, split_of
from fedssl.errors import InputError, shortened
from fedssl.logs import log_once

_LEVELS = {"class": ("class",), "owner": ("owner",), "owner/class": ("owner", "class"), "none": ()}
_MASKS = {  # names that no class has
    *("mask", "masks", "annotations", "segmentation", "segmentationclass", "groundtruth", "ground_truth", "gt"),
    *("labels", "labelstr", "labelsts"),
}


@dataclass(frozen=True)
class _Part:
    """Images of one folder, with the names of their classes and owners as far as these have folders."""

    folder: str
    files: list[str]
    names: Mapping[str, list[str]]  # by "class" and "owner"
    identities: Collection[tuple[int, int]] = ()  # of the files, if there are links
    empty: list[str] = field(default_factory=list)  # folders of classes without images

    @property
    def classes(self) -> set[str]:
        return set(self.names.get("class", ()))


def list_split(source: Source, query: Query) -> SequenceIndex:
    """Return the image files of a split, sorted by path; `InputError` for a split that does not exist."""
    split, folders, test_fraction = query.split, query.folders, query.test_fraction
    listing = source.listing
    base, names = _find_splits(listing, query.split_folders, descend=folders in ("class", "none"))
    below = f"{listing.root}/{base}".rstrip("/")
    parts = {
        name: _part(source.below(f"{base}{name}"), folders, domain=domain_of(name), compared=listing.linked)
        for name in names
    }
    parts = _without_lone_classes(parts) or {"train": _part(listing, folders)}
    classes = _classes(parts)
    warnings = _inner_splits(listing) if query.split_folders == "auto" and not names else ()
    if masks := [name for name in classes if name.lower() in _MASKS]:
        line = f"{below}: images of {shortened(masks)} are trained on as a class; if these are masks, set "
        warnings += (f"{line}dataset.path to the folder of the images",)
    if words := [name for name in classes if split_of(name) in ("test", "unlabeled")]:
        warnings += (
            f"{below}: {shortened(words)} is trained on as a class; if it is a split, move the other folders into a "
            "folder train beside it",
        )
    if folders == "owner/class" and (wrapper := _wrapper(parts)):
        line = f"{below}: all images are of one owner (domain), {wrapper}; if this folder only holds the owners, set "
        warnings += (f"{line}dataset.path={below}/{wrapper}",)
    empty = [name for part in parts.values() for name in part.empty]
    filled = {path[len(base) :].partition("/")[0] for path in [*listing.paths, *listing.repeated]}
    empty += [name for name in listing.subfolders(base) if names and name not in filled]
    source.log(_layout(listing, parts if names else {}, classes, empty))

    train, held_out = matching("train", parts), [name for kind in HELD_OUT for name in matching(kind, parts)]
    chosen = _test_folders(below, parts, classes) if split == "test" else matching(split, parts)
    if train and not held_out and (split == "test" or chosen == train):
        return replace(_index(query, _joined(parts, train), classes, warnings), shared=True)
    if not chosen:
        others = [*parts, *(["test (a share of it)"] if train and not held_out else [])]
        remedy = "name one of them in dataset.splits, or set dataset.split_folders="
        remedy += "false if they are no splits" if names else "true if its subfolders are splits"
        if len(names) == 1 and not train:
            remedy = "set dataset.split_folders=false, with which dataset.test_fraction of the images are the test"
        raise InputError(f"{below} has no split {split!r}, only {shortened(others)}; {remedy}")
    if test_fraction and not held_out:
        is_held_out_of(chosen, train, split=split, fraction=test_fraction)
    part = _joined(parts, chosen)
    if train and chosen != train:
        warnings += _compared(part, _joined(parts, train), classes)
    return _index(query, part, classes, warnings)


def _inner_splits(listing: Listing) -> tuple[str, ...]:
    """Return a warning about folders of splits inside other folders, whose images are mixed."""
    kinds: dict[str, set[str | None]] = {}
    for folder in listing.folders:
        parent, _, name = folder.rpartition("/")
        kinds.setdefault(parent, set()).add(split_of(name))
    inside = [parent for parent, found in kinds.items() if parent and "train" in found and found & {*HELD_OUT}]
    line = f"{listing.root}: the folders of splits in {shortened(inside)} are not used as splits, and test images are "
    line += "trained on; give one of these folders, or dataset.split_folders=false if this is meant"
    return (line,) if inside else ()


def _layout(listing: Listing, parts: Mapping[str, _Part], classes: Sequence[str], empty: Sequence[str]) -> str:
    """Return what was recognized."""
    other = "ZARR" if is_zarr(listing.root) else "DICOM"  # whose names may have any ending
    formats = Counter(FORMAT_OF.get(ending_of(path), other) for path in listing.paths)
    line = ", ".join(f"{count:,} {name} file{'s'[: count != 1]}" for name, count in formats.most_common())
    found = [f"{name} ({len(part.files):,} images)" for name, part in parts.items()]
    line += f"; splits {', '.join(found)}" if found else ""
    line += f"; {len(classes):,} classes ({shortened(classes)})" if classes else "; no classes"
    line += f"; without images: {shortened(sorted(set(empty)))}" if empty else ""
    unused = len(listing.paths) - sum(len(part.files) for part in parts.values()) if parts else 0
    line += f"; {unused:,} images outside the splits are not used" if unused > 0 else ""
    return line


def _test_folders(below: str, parts: Mapping[str, _Part], classes: Sequence[str]) -> list[str]:
    """Return the folders of the test images: those of the test, or else of the validation, with labels if possible."""
    groups = [group for kind in HELD_OUT if (group := matching(kind, parts))]
    train = [parts[name] for name in matching("train", parts)]
    labeled = [group for group in groups if all("class" in parts[name].names for name in group)]
    if classes and groups and not labeled and train and train[0].classes:
        found = shortened(sorted(train[0].classes))
        raise InputError(
            f"{train[0].folder} has the classes {found} but {below}/{groups[0][0]} has none of them; set "
            f"dataset.path={train[0].folder} to hold out the share dataset.test_fraction of these images"
        )
    chosen = next(iter(labeled or groups), [])
    if chosen and split_of(chosen[0]) != "test":
        log_once(logging.INFO, f"{below}: {shortened(chosen)} serves as the test")
    return chosen


def _wrapper(parts: Mapping[str, _Part]) -> str:
    """Return the only owner if all images are in subfolders of its classes; empty otherwise."""
    owners = {name for part in parts.values() for name in part.names.get("owner", ())}
    inner = (file[len(part.folder) + 1 :] for part in parts.values() for file in part.files)
    return owners.pop() if len(owners) == 1 and all(path.count("/") > 2 for path in inner) else ""


def _find_splits(listing: Listing, split_folders: bool | str, *, descend: bool) -> tuple[str, list[str]]:
    """Return the folder of the splits' folders, empty or ending in "/", and their names; no names if there are none.

    ``descend`` allows to enter a folder that holds all images.
    """
    base, paths = "", [*listing.paths, *listing.repeated]
    while True:
        below = [path[len(base) :].partition("/") for path in paths]
        names = sorted({name for name, slash, _ in below if slash})
        words = [name for name in names if split_of(name)]
        if split_folders == "auto" and len(words) < len(names):
            copies = _copies(below, words)
            names = [name for name in names if name not in copies]
        enter = descend and len(names) == 1 and all(slash for _, slash, _ in below)
        if split_folders is True and words + names[1:]:
            return base, names
        if split_folders == "auto" and words and _are_splits(f"{listing.root}/{base}".rstrip("/"), names, words):
            return base, names
        if not enter:
            break
        base += f"{names[0]}/"
    if split_folders is True:
        raise InputError(
            f"dataset.split_folders=true but {listing.root} has no folders of splits; set dataset.split_folders=auto"
        )
    return "", []


def _copies(below: Sequence[tuple[str, str, str]], words: Sequence[str]) -> set[str]:
    """Return the folders that repeat the splits beside them: chest_xray/chest_xray/train beside chest_xray/train."""
    splits, others = set[str](), defaultdict[str, set[str]](set)
    for name, _, path in below if len(words) > 1 else ():
        if name in words:
            splits.add(f"{name}/{path}")
        else:
            others[name].add(path)
    return {name for name, paths in others.items() if paths == splits}


def _are_splits(folder: str, names: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether all folders are named after splits; `InputError` if only some are, but training and test."""
    others = [name for name in names if name not in words]
    kinds = {split_of(name) for name in words}
    if others and "train" in kinds and kinds & {*HELD_OUT}:
        raise InputError(
            f"{folder} has folders named after splits ({shortened(words)}) beside others ({shortened(others)}); set "
            "dataset.split_folders=true if all are splits, of which dataset.splits names those to use, or false if all "
            "are classes"
        )
    return not others


def _part(listing: Listing, folders: str, *, domain: str = "", compared: bool = False) -> _Part:
    """Return the images of a listing with the names of their owners and classes, and identities to be compared.

    All of them are in a folder with the name of the ``domain``, if there is one: trainA/1.png is read as train/A/1.png.
    """
    if folders == "class" and (listed := listed_classes(Path(listing.root), listing.paths)):
        files = [f"{listing.root}/{path}" for path in listing.paths]
        return _Part(listing.root, files, {"class": listed}, listing.identities() if compared else ())
    first, levels = f"{domain}/" if domain else "", _LEVELS[folders]
    paths, below = ([f"{first}{path}" for path in listed] for listed in (listing.paths, listing.folders))
    start = _num_wrappers(paths) if folders == "class" and paths else 0
    middle = {path.split("/")[1] if path.count("/") > 2 else "" for path in paths} if folders == "owner/class" else {""}
    if len(middle) == 1 and (name := middle.pop()):  # amazon/images/mug/1.jpg of Office-31
        paths, below = ([f"{path}/".replace(f"/{name}/", "/", 1)[:-1] for path in listed] for listed in (paths, below))
    depth = start + len(levels)
    columns: list[list[str]] = [[] for _ in levels]
    num_loose, loose = 0, ""
    for path in paths:
        *parents, _ = path.split("/", depth)
        if len(parents) < depth:
            num_loose, loose = num_loose + 1, loose or path
            continue
        for column, name in zip(columns, parents[start:], strict=True):
            column.append(_display(name))
    if num_loose and (folders != "class" or num_loose < len(paths)):
        raise _layout_error(listing, loose.removeprefix(first), levels[loose.count("/") - start], folders)
    files = [f"{listing.root}/{path}" for path in listing.paths]
    names = {} if num_loose else dict(zip(levels, columns, strict=True))
    empty = [_display(folder.rpartition("/")[2]) for folder in below if folder.count("/") == depth - 1]
    identities = listing.identities() if compared else ()
    return _Part(listing.root, files, names, identities, sorted({*empty} - {*(columns or [[]])[-1]}))


def _num_wrappers(paths: Sequence[str]) -> int:
    """Return the number of nested folders that hold all images and are no class."""
    first, last = (path.split("/")[:-1] for path in (paths[0], paths[-1]))  # sorted: the others share their beginning
    common = [folder for folder, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))]
    is_last_class = common and all(path.count("/") == len(common) for path in paths) and not split_of(common[-1])
    return len(common) - bool(is_last_class)


@cache
def _display(name: str) -> str:
    """Return the name of a folder as printable text: macOS decomposes letters, and names may have any bytes."""
    return unicodedata.normalize("NFC", os.fsencode(name).decode(errors="backslashreplace"))


def _layout_error(listing: Listing, loose: str, level: str, folders: str) -> InputError:
    """Make the error for the image ``loose`` and others of its folder, beside or in place of subfolders."""
    start, _, _ = loose.rpartition("/")
    start += "/" if start else ""
    below = [path[len(start) :].partition("/") for path in listing.paths if path.startswith(start)]
    names = sorted({name for name, slash, _ in below if slash})
    beside = f"beside the subfolders {shortened(names)}" if names else f"but dataset.folders={folders} needs subfolders"
    no_labels = {"class": "none", "owner/class": "owner"}[folders] if level == "class" else ""
    return InputError(
        f"{listing.root}/{start}".rstrip("/") + f" holds {sum(not slash for _, slash, _ in below)} loose images "
        f"{beside}; move them into a subfolder (one per {level})"
        + (f", or give dataset.folders={no_labels} for no labels" if no_labels else "")
    )


def _without_lone_classes(parts: Mapping[str, _Part]) -> dict[str, _Part]:
    """Remove a single class of a split, and those of an unlabeled split, unless others have it: test/images/1.png."""
    counts, kept = Counter(name for part in parts.values() for name in part.classes), {}
    for name, part in parts.items():
        may_be_lone = len(part.classes) == 1 or split_of(name) == "unlabeled"
        is_lone = may_be_lone and all(counts[each] == 1 for each in part.classes)
        names = {level: part.names[level] for level in part.names if level != "class" or not is_lone}
        kept[name] = replace(part, names=names)
    return kept


def _joined(parts: Mapping[str, _Part], names: Sequence[str]) -> _Part:
    """Join the folders of one split."""
    chosen = [parts[name] for name in names]
    if len({tuple(part.names) for part in chosen}) > 1:
        raise InputError(
            f"the folders {', '.join(part.folder for part in chosen)} are one split, but only some of them have class "
            "folders; name one of them in dataset.splits"
        )
    return _Part(
        chosen[0].folder,
        list(chain.from_iterable(part.files for part in chosen)),
        {level: list(chain.from_iterable(part.names[level] for part in chosen)) for level in chosen[0].names},
        list(chain.from_iterable(part.identities for part in chosen)),
    )


def _classes(parts: Mapping[str, _Part]) -> tuple[str, ...]:
    """Return the sorted classes of all splits; none if no split has a second class."""
    of_split = defaultdict[str, set[str]](set)  # which may have several folders
    for name, part in parts.items():
        of_split[split_of(name) or name] |= part.classes
    if all(len(classes) < 2 for classes in of_split.values()):
        return ()
    classes = sorted(set[str]().union(*of_split.values()))
    spellings: dict[str, list[str]] = {}
    for name in classes:
        spellings.setdefault(name.strip().casefold(), []).append(name)
    for names in spellings.values():
        if len(names) > 1 and not any(map(set(names).issubset, of_split.values())):
            raise InputError(
                f"the splits spell a class differently ({', '.join(map(repr, names))} in "
                f"{', '.join(part.folder for part in parts.values())}); rename its folders"
            )
    return tuple(classes)


def _compared(part: _Part, train: _Part, classes: Sequence[str]) -> tuple[str, ...]:
    """Return a warning if a split shares images with the training, by links; `InputError` if they share no class."""
    if classes and part.classes and train.classes and part.classes.isdisjoint(train.classes):
        mine, others = (shortened(sorted(each.classes)) for each in (part, train))
        raise InputError(f"{part.folder} has the classes {mine} but {train.folder} has {others}; give both the same")
    shared = len({*part.identities} & {*train.identities})
    line = f"{shared:,} of the {len(part.files):,} images of {part.folder} are also in {train.folder}, by links"
    if shared and shared == len(part.files):
        raise InputError(f"{line}; give other images, or set dataset.splits.test=null for no test")
    return (line,) if shared else ()


def _index(query: Query, part: _Part, classes: tuple[str, ...], warnings: tuple[str, ...]) -> SequenceIndex:
    """Return the images with the numbers of their classes, unless no labels are wanted, and of their owners."""
    class_names, owners = part.names.get("class"), part.names.get("owner")
    owner_names = tuple(sorted(set(owners or ())))
    classes = () if class_names is None or query.label is None else classes
    return SequenceIndex(
        name=query.name,
        count=len(part.files),
        decoding=query.decoding,
        files=part.files,
        num_in_files=len(part.files),
        key={"reader": "folder"},
        images=part.files,
        labels=None if class_names is None or not classes else _numbered(class_names, classes),
        classes=classes,
        owners=None if owners is None else _numbered(owners, owner_names),
        owner_names=owner_names,
        warnings=warnings,
    )


def _numbered(names: Sequence[str], order: Sequence[str]) -> np.ndarray:
    numbers = {name: number for number, name in enumerate(order)}
    return np.fromiter((numbers[name] for name in names), dtype=np.int64, count=len(names))
