"""Recognition of what ``dataset.path`` holds: images, tables, or arrays.

A path is a file, a folder or a pattern. Files of one kind are read: images if there are any, but of the data sets of
the Hub the others.
"""

import logging
import os
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedssl.config.literal import user_path
from fedssl.datasets.formats import SUFFIXES, is_zarr, missing_packages
from fedssl.datasets.listing import (
    Listing,
    ending_by_content,
    ending_of,
    exists,
    is_file,
    is_folder,
    is_hidden,
    list_files,
)
from fedssl.datasets.manifest import SUFFIXES as MANIFEST_SUFFIXES
from fedssl.datasets.shards import SUFFIXES as SHARD_SUFFIXES
from fedssl.errors import InputError, sanitize, shortened
from fedssl.logs import log_once

IMAGES, TABLES, ARRAYS = "images", "tables", "arrays"
_CONTAINERS = dict.fromkeys((".arrow", ".parquet", *SHARD_SUFFIXES), TABLES) | {".npz": ARRAYS}  # kinds by ending
_MANIFESTS = dict.fromkeys(MANIFEST_SUFFIXES, TABLES)  # only if the path names them
ALLOWED = " ".join((*_CONTAINERS, *_MANIFESTS, *SUFFIXES))
_LIST_SUFFIXES = {".json", ".lst", ".txt", ".xls", ".xlsx"}
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
MASK = re.compile(r"(.+)_[mM]ask(?:_?\d+)?", re.DOTALL)  # name of a mask, with that of its image
_MAX_NAMES = 10**6  # that braces stand for
_UNPACK = {
    ".zip": "unzip FILE -d FOLDER",
    ".rar": "unrar x FILE FOLDER/",
    ".7z": "7z x FILE -oFOLDER",
    ".gz": "gunzip FILE",
}
_UNPACK |= dict.fromkeys((".bz2", ".xz", ".zst", ".tbz2", ".txz"), "tar xf FILE -C FOLDER")  # commands by ending
_LOAD = dict.fromkeys((".h5", ".hdf5"), "h5py.File('FILE')['NAME'][:]") | {".mat": "scipy.io.loadmat('FILE')['NAME']"}


class NoImagesError(InputError):
    """A path without images; ``remedies`` has no part of it."""

    def __init__(self, message: str, remedies: Sequence[str]) -> None:
        super().__init__(sanitize(message))
        self.remedies = remedies


@dataclass(frozen=True)
class Source:
    """The files of one kind."""

    path: str  # as the user gave it
    kind: str
    listing: Listing
    setting: str = "dataset.path"  # name of the path in messages
    masks: Sequence[str] = ()  # images that are not read, see `_masks`

    @property
    def files(self) -> dict[Path, str]:
        """Files with their names below the root of the listing."""
        return {Path(self.listing.root) / name: name for name in self.listing.paths}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about images that are not read."""
        ignored = self.listing.ignored
        lines = [f"{count:,} images are ignored; {remedy}" for count, remedy in missing_packages(ignored)]
        if self.masks:
            line = (
                f"{len(self.masks):,} images are ignored as masks of those beside them ({shortened(self.masks)}); to "
            )
            lines.append(
                f"{line}read these alone, set {shlex.quote(f'{self.setting}={self.listing.root}/**/*_[mM]ask*')}"
            )
        others = sorted((_CONTAINERS | _MANIFESTS).keys() & ignored.keys()) if self.kind == IMAGES else []
        if others:
            count = sum(ignored[ending] for ending in others)
            lines.append(
                f"only the {len(self.listing.paths):,} image files are read, and {count:,} file{'s'[: count != 1]} "
                f"ending in {' '.join(others)} {'is' if count == 1 else 'are'} ignored; to read these, set "
                f"'{self.setting}={self.listing.root}/**/*{others[0]}'"
            )
        return tuple(f"{self.path}: {line}" for line in lines)

    def below(self, folder: str) -> Listing:
        """Return the listing of a subfolder by itself, without masks."""
        listing = self.listing.below(folder, SUFFIXES)
        return _without(_masks(listing.paths), listing)

    def log(self, found: str) -> None:
        """Log what was found in the files, and what is ignored, in one line."""
        ignored = self.listing.ignored_kinds()
        log_once(logging.INFO, f"{self.path}: {found}{'; ignored ' if ignored else ''}{ignored}")


def find(path: str, *, containers_first: bool = False, setting: str = "dataset.path") -> Source:
    """Return the files of ``path``, the value of ``setting``; `InputError` if there are none.

    ``containers_first`` reads images last.
    """
    root = user_path(path)
    endings = {*SUFFIXES, *_CONTAINERS}
    listing = (
        list_files(root, endings)
        if is_folder(root) and not is_zarr(root)
        else _matching(root, endings | _MANIFESTS.keys(), setting)
    )
    of_kind: dict[str, list[str]] = {}
    for name in listing.paths:
        of_kind.setdefault((_CONTAINERS | _MANIFESTS).get(ending_of(name), IMAGES), []).append(name)
    kinds = (TABLES, ARRAYS, IMAGES) if containers_first else (IMAGES, TABLES, ARRAYS)
    kind = next((kind for kind in kinds if kind in of_kind), None)
    if kind is None and not listing.repeated:
        raise _no_images(path, listing, setting)
    names = of_kind.get(kind or IMAGES, [])
    masks = _masks(names) if kind == IMAGES else []
    return Source(path, kind or IMAGES, _without(masks, listing.only(names)), setting, masks)


def _without(masks: Sequence[str], listing: Listing) -> Listing:
    masked = {*masks}
    return listing.only([name for name in listing.paths if name not in masked])


def _masks(names: Sequence[str]) -> list[str]:
    """Return the images that are masks of others: ``X_mask.png`` and ``X_mask_1.png`` beside ``X.png``, as of BUSI."""
    named = [name for name in names if "_mask" in name.lower()]
    images = {name[: -len(ending_of(name))] for name in names} if named else set()
    found = {name: MASK.fullmatch(name[: -len(ending_of(name))]) for name in named}
    return [name for name, match in found.items() if match and match[1] in images]


def _no_images(path: str, listing: Listing, setting: str) -> NoImagesError:
    if os.path.islink(link := user_path(path)) and not exists(link):  # noqa: PTH114 - pathlib's raises for long names
        return NoImagesError(
            f"{setting}: {path} is a link to {link.readlink()}, which does not exist; give another path", ()
        )
    if not is_folder(user_path(path)) and not listing.ignored:
        return NoImagesError(
            f"{setting}: {path} is not a folder, a file or a pattern that matches files, such as '/data/site_*/**/*'; "
            "give what holds your images",
            (),
        )
    remedies = [remedy for _, remedy in missing_packages(listing.ignored)]
    commands = dict.fromkeys(_UNPACK[ending] for ending in listing.ignored if ending in _UNPACK)
    remedies += [f"unpack archives into an existing folder first: {', '.join(commands)}"] if commands else []
    loads = dict.fromkeys(_LOAD[ending] for ending in listing.ignored if ending in _LOAD)
    remedies += [
        f"store arrays as .npy, images along the first axis: numpy.save('images.npy', {load})" for load in loads
    ]
    if listing.ignored.keys() & _LIST_SUFFIXES and is_file(user_path(path)):
        remedies.append("a list of images is a CSV file with the columns path and label")
    ignored = listing.ignored_kinds()
    found = f" (ignored {ignored})" if ignored else ""
    message = f"{path} holds no image{found}; allowed are files ending in {ALLOWED}"
    return NoImagesError("; ".join([message, *remedies]), remedies)


def _matching(pattern: Path, endings: Collection[str], setting: str) -> Listing:
    """Return a file, or those that match a pattern, hidden ones only if it is hidden; the root is its fixed part."""
    patterns = (
        [pattern] if is_file(pattern) or is_folder(pattern) else list(map(Path, _without_braces(str(pattern), setting)))
    )
    if len(patterns) > 1:
        patterns = [each / "**" / "*" if is_folder(each) and not is_zarr(each) else each for each in patterns]
    if len({each.is_absolute() for each in patterns}) > 1:
        patterns = [each.absolute() for each in patterns]
    bases = list(map(_fixed_part, patterns))
    found = [_matches(each, base) for each, base in zip(patterns, bases, strict=True)]
    missing = [str(each) for each, files in zip(patterns, found, strict=True) if not files]
    if missing and len(patterns) > 1:
        raise InputError(
            f"{setting}={pattern} names {len(patterns)} files or patterns, of which {len(missing)} match no file, "
            f"such as {shortened(missing)}; correct the braces"
        )
    listing = Listing(os.path.commonpath(bases) or ".")
    start = 0 if listing.root == "." else len(listing.root.rstrip("/")) + 1
    names = {str(file)[start:] for files in found for file in files}
    for name in sorted(names, key=lambda name: name.replace("/", "\0")):
        ending = ending_by_content(f"{listing.root}/{name}")
        if ending in endings:
            listing.paths.append(name)
        else:
            listing.ignored[ending] += 1
    return listing


def _matches(pattern: Path, base: Path) -> list[Path]:
    """Return the files that match a pattern below the folder ``base``, hidden ones only if it is hidden."""
    if is_file(pattern):
        return [pattern]
    relative = pattern.relative_to(base)
    hidden = sum(map(is_hidden, relative.parts))
    in_zarr = ".zarr" in map(ending_of, relative.parts[:-1])
    if "**" in relative.parts and is_folder(base) and not (hidden or in_zarr):  # `Path.glob` follows no links in it
        listing = list_files(base, None, pattern=relative.parts)
        if listing.repeated:
            line = f"{pattern}: ignored links to what is listed already: {shortened(listing.repeated)}"
            log_once(logging.INFO, line)
        return [base / path for path in listing.paths]
    try:
        found = list(base.glob(str(relative)))
    except (OSError, ValueError):  # a name above 255 bytes; no pattern, e.g. *** in some versions of Python
        return []
    return [file for file in found if is_file(file) and sum(map(is_hidden, file.relative_to(base).parts)) <= hidden]


def _fixed_part(pattern: Path) -> Path:
    """Return the folder of a pattern's first part with a wildcard, which no folder has as its name."""
    fixed = Path(pattern.anchor)
    for part in pattern.parts[bool(pattern.anchor) : -1]:
        if {*part} & {*"*?["} and not is_folder(fixed / part):
            break
        fixed /= part
    return fixed


def _without_braces(pattern: str, setting: str) -> list[str]:
    """Return the patterns that ``{a,b}`` and ``{000..012}`` stand for, as in shells and WebDataset."""
    found = [pattern]
    while all_braces := list(filter(None, map(_BRACES.search, found))):  # the first without others inside
        found = []
        for braces in all_braces:
            first, last, words = braces.groups()
            numbers = range(int(first or 0), int(last or 0) + 1)
            if len(found) + len(numbers) > _MAX_NAMES:
                raise InputError(f"{setting}={pattern} names above {_MAX_NAMES:,} files; use * in place of braces")
            values = words.split(",") if words else (f"{number:0{len(first)}}" for number in numbers)
            found += [braces.string[: braces.start()] + value + braces.string[braces.end() :] for value in values]
    return list(dict.fromkeys(found))
