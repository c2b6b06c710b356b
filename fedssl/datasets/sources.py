"""Recognition of what ``dataset.path`` holds: images, tables, or arrays.

A path is a file, a folder or a pattern. Files of one kind are read: images if there are any, but of the data sets of
the Hub the others.
"""

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedssl.config.literal import user_path
from fedssl.datasets.formats import SUFFIXES, is_zarr, missing_packages
from fedssl.datasets.listing import (
    Listing,
    ending_by_content,
    ending_of,
    is_file,
    is_folder,
    is_hidden,
    list_files,
    log_once,
)
from fedssl.datasets.manifest import SUFFIXES as MANIFEST_SUFFIXES
from fedssl.errors import InputError, shortened
from fedssl.safe_io import sanitize

IMAGES, TABLES, ARRAYS = "images", "tables", "arrays"
_CONTAINERS = {".arrow": TABLES, ".parquet": TABLES, ".tar": TABLES, ".npz": ARRAYS}  # kinds of files by ending
_MANIFESTS = dict.fromkeys(MANIFEST_SUFFIXES, TABLES)  # only if the path names them
ALLOWED = " ".join((*_CONTAINERS, *_MANIFESTS, *SUFFIXES))
_ARCHIVES = (".zip", ".gz", ".bz2", ".xz", ".zst", ".tgz", ".rar", ".7z")


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

    @property
    def files(self) -> dict[Path, str]:
        """Files with their names below the root of the listing."""
        return {Path(self.listing.root) / name: name for name in self.listing.paths}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about images that are not read."""
        ignored = self.listing.ignored
        lines = [f"{count:,} images are ignored; {remedy}" for count, remedy in missing_packages(ignored)]
        others = sorted((_CONTAINERS | _MANIFESTS).keys() & ignored.keys()) if self.kind == IMAGES else []
        if others:
            count = sum(ignored[ending] for ending in others)
            lines.append(
                f"only the {len(self.listing.paths):,} image files are read, and {count:,} file{'s'[: count != 1]} "
                f"ending in {' '.join(others)} {'is' if count == 1 else 'are'} ignored; to read these, set "
                f"'{self.setting}={self.listing.root}/**/*{others[0]}'"
            )
        return tuple(f"{self.path}: {line}" for line in lines)

    def log(self, found: str) -> None:
        """Log what was found in the files, and what is ignored, in one line."""
        ignored = self.listing.ignored_kinds()
        log_once(logging.INFO, sanitize(f"{self.path}: {found}{'; ignored ' if ignored else ''}{ignored}"))


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
    return Source(path, kind or IMAGES, listing.only(of_kind.get(kind or IMAGES, [])), setting)


def _no_images(path: str, listing: Listing, setting: str) -> NoImagesError:
    if not is_folder(user_path(path)) and not listing.ignored:
        return NoImagesError(
            f"{setting}: {path} is not a folder, a file or a pattern with matches; give what holds your images", ()
        )
    remedies = [remedy for _, remedy in missing_packages(listing.ignored)]
    if any(ending in _ARCHIVES for ending in listing.ignored):
        remedies.append("unpack archives first, .tar.gz with gunzip")
    ignored = listing.ignored_kinds()
    found = f" (ignored {ignored})" if ignored else ""
    message = f"{path} holds no image{found}; allowed are files ending in {ALLOWED}"
    return NoImagesError("; ".join([message, *remedies]), remedies)


def _matching(pattern: Path, endings: Collection[str], setting: str) -> Listing:
    """Return a file, or those that match a pattern, hidden ones only if it is hidden; the root is its fixed part."""
    listing = Listing(str(pattern.parent))
    if braces := re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", pattern.name):
        first, last = int(braces[2]), int(braces[3])
        names = [f"{braces[1]}{n:0{len(braces[2])}}{braces[4]}" for n in range(first, min(last, first + 10**6) + 1)]
        missing = [name for name in names if not is_file(pattern.parent / name)]
        if missing:
            raise InputError(
                f"{setting}={pattern} names {len(names)} files, of which {len(missing)} do not exist, such as "
                f"{shortened(missing)}; correct the numbers"
            )
        listing.paths = names
        return listing
    parts = pattern.parts
    start = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts) - 1)
    if is_file(pattern):
        start = len(parts) - 1
    base, relative = Path(*parts[:start]), "/".join(parts[start:])
    try:
        found = [relative] if is_file(pattern) else [str(file.relative_to(base)) for file in base.glob(relative)]
    except (OSError, ValueError):  # a name above 255 bytes; no pattern, e.g. *** in some versions of Python
        found = []
    hidden = sum(map(is_hidden, parts[start:]))
    listing.root = str(base)
    for name in sorted(found, key=lambda name: name.replace("/", "\0")):
        if is_file(base / name) and sum(map(is_hidden, name.split("/"))) <= hidden:
            ending = ending_by_content(f"{base}/{name}")
            if ending in endings:
                listing.paths.append(name)
            else:
                listing.ignored[ending] += 1
    return listing
