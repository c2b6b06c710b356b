"""Files below a folder: one listing for training, for counting and for the checks of a device.

Hidden files and folders are left out at any depth: names that begin with a dot, and `HIDDEN_NAMES`. Every folder is
listed once: a link to a folder that is listed under another path, or that contains the listed folder, is not followed,
so that loops end. A link to a file that is listed under another path is left out, too. Files are sorted by path, on
every file system.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from fedssl.datasets.formats import DICOM_DIRECTORY, DICOM_SUFFIX, DOUBLE_SUFFIXES, is_dicom, is_zarr
from fedssl.errors import InputError, sanitize

# Made by operating systems, network drives and Python; in lower case.
HIDDEN_NAMES = {"__macosx", "__pycache__", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "recycler"}
HIDDEN_NAMES |= {"system volume information", "lost+found", "@eadir", "@tmp", "@recycle", "@recently-snapshot"}
HIDDEN_NAMES |= {"#recycle", "#snapshot"}
_MAX_ENDINGS = 5  # named in a line
_ALL = ("**", "*")  # pattern of all files

_Identity = tuple[int, int]  # device and inode


@dataclass
class Listing:
    """Files below the folder ``root``, and what else is there."""

    root: str
    paths: list[str] = field(default_factory=list)  # of the files, relative to the root, sorted by their parts
    folders: list[str] = field(default_factory=list)  # all folders below the root
    linked: bool = False  # whether there is a link to a file or a folder
    ignored: Counter[str] = field(default_factory=Counter)  # number of other files by ending
    hidden: int = 0  # hidden files and folders
    broken: int = 0  # links that lead nowhere
    repeated: list[str] = field(default_factory=list)  # links to what is listed already; folders end in "/"

    def identities(self) -> list[_Identity]:
        """Return the identities of the files, by which different paths of one file are recognized."""
        return [_identity(f"{self.root}/{path}") for path in self.paths]

    def subfolders(self, base: str = "") -> list[str]:
        """Return the names of the folders in the folder ``base``, which is empty or ends in "/"."""
        names = [folder[len(base) :] for folder in self.folders if folder.startswith(base)]
        return [name for name in names if "/" not in name]

    def below(self, folder: str, suffixes: Collection[str]) -> "Listing":
        """Return the listing of a subfolder by itself, which contains links that are left out here."""
        root, prefix = f"{self.root}/{folder}", f"{folder}/"
        if self.linked:
            return list_files(Path(root), suffixes)
        paths, folders = (
            [path[len(prefix) :] for path in listed if path.startswith(prefix)] for listed in (self.paths, self.folders)
        )
        return Listing(root, paths, folders=folders)

    def only(self, paths: list[str]) -> "Listing":
        """Return the listing of some of the files; the others are ignored."""
        others = Counter(map(ending_of, set(self.paths).difference(paths)))
        return replace(self, paths=paths, ignored=self.ignored + others)

    def ignored_kinds(self) -> str:
        """Return how much of each kind is ignored; empty for nothing."""
        counts = {"hidden files and folders": self.hidden, "broken links": self.broken}
        counts |= {"links to what is listed already": len(self.repeated)}
        total = self.ignored.total()
        parts = [f"{total:,} file{'s'[: total != 1]}: {self._endings()}"] if total else []
        return sanitize("; ".join([*parts, *(f"{what}: {count:,}" for what, count in counts.items() if count)]))

    def _endings(self) -> str:
        named = [f"{count:,} {ending or 'without ending'}" for ending, count in self.ignored.most_common(_MAX_ENDINGS)]
        rest = len(self.ignored) - _MAX_ENDINGS
        return ", ".join([*named, f"{rest} more endings"] if rest > 0 else named)


def list_files(root: Path, suffixes: Collection[str] | None, *, pattern: Sequence[str] = _ALL) -> Listing:
    """List the files below a folder whose names end in one of ``suffixes``, in any case; None: in anything.

    Their paths match the parts of a ``pattern``, where ``**`` is any number of folders. Raise an `InputError` for a
    folder that cannot be read.
    """
    return _Walk(str(root), None if suffixes is None else frozenset(suffixes), tuple(pattern)).run()


def is_folder(path: Path) -> bool:
    """Return whether a path is that of a folder, or a link to one."""
    return _has(path.is_dir)


def is_file(path: Path) -> bool:
    """Return whether a path is that of a regular file or of Zarr, or a link to one."""
    return _has(path.is_file) or _has(lambda: is_zarr(path))


def exists(path: Path) -> bool:
    """Return whether there is anything at a path."""
    return _has(path.exists)


def is_hidden(name: str) -> bool:
    """Return whether a file or folder with this name is hidden."""
    return name.startswith(".") or name.lower() in HIDDEN_NAMES


def ending_of(name: str) -> str:
    """Return the ending of a file's name in lower case, such as ``.png`` or ``.nii.gz``; empty if there is none."""
    lower = name.lower()
    double = next((ending for ending in DOUBLE_SUFFIXES if lower.endswith(ending)), None)
    stem, _, ending = lower.rpartition(".")
    return double or (f".{ending}" if stem else "")


def ending_by_content(path: str) -> str:
    """Return the ending of a file's name in lower case, and that of DICOM for DICOM files without one.

    Scanners and archives name these files ``IM0001``, or by numbers that dots separate.
    """
    name = path.rpartition("/")[2]
    ending = ".zarr" if is_zarr(path) else ending_of(name)
    may_be_dicom = (not ending or ending[1:].isdigit()) and name.upper() != DICOM_DIRECTORY
    return DICOM_SUFFIX if may_be_dicom and is_dicom(path) else ending


class _Walk:
    """A walk through a folder: first without links, then through each linked folder."""

    def __init__(self, root: str, suffixes: frozenset[str] | None, pattern: tuple[str, ...]) -> None:
        self._listing, self._suffixes, self._pattern = Listing(root), suffixes, pattern
        self._linked_files = set[str]()  # paths of files that are links
        self._links = deque[str]()  # linked folders, not visited yet
        self._visited = {_identity(str(parent)) for parent in Path(root).resolve().parents}

    def run(self) -> Listing:
        self._visit("", linked=False)
        while self._links:
            self._visit(self._links.popleft(), linked=True)
        if self._listing.linked:
            self._sort_and_drop_repeated()
        return self._listing

    def _visit(self, folder: str, *, linked: bool) -> None:
        """Add the files of a folder and, depth first, of its subfolders; leave links to folders for later."""
        pending = [iter([folder])]
        while pending:
            path = next(pending[-1], None)
            if path is None:
                pending.pop()
                continue
            with self._reading(path) as absolute:
                identity = _identity(absolute)
            if linked and identity in self._visited:
                self._listing.repeated.append(f"{path}/")
            else:
                self._visited.add(identity)
                self._listing.folders += [path] if path else []
                pending.append(self._add_entries(path))

    def _add_entries(self, folder: str) -> Iterator[str]:
        """Add the files of a folder and yield the paths of its subfolders, in the order of their names."""
        is_file, links, parents = dict[str, bool](), set[str](), tuple(filter(None, folder.split("/")))
        with self._reading(folder) as absolute, os.scandir(absolute) as entries:
            for entry in entries:
                if self._is_broken_or_hidden(entry):
                    continue
                ending = ending_by_content(entry.path)
                is_folder = entry.is_dir() and ending != ".zarr"
                if not _matches((*parents, entry.name), self._pattern, is_folder=is_folder):
                    continue
                if entry.is_symlink():
                    links.add(entry.name)
                if is_folder:
                    is_file[entry.name] = False
                elif (entry.is_file() or entry.is_dir()) and (self._suffixes is None or ending in self._suffixes):
                    is_file[entry.name] = True
                else:
                    self._listing.ignored[ending] += 1
        self._listing.linked |= bool(links)
        for name in sorted(is_file):
            path = f"{folder}/{name}" if folder else name
            if is_file[name]:
                self._listing.paths.append(path)
                self._linked_files |= {path} if name in links else set()
            elif name in links:
                self._links.append(path)
            else:
                yield path

    def _is_broken_or_hidden(self, entry: os.DirEntry[str]) -> bool:
        if is_hidden(entry.name):
            self._listing.hidden += 1
            return True
        if entry.is_symlink():
            try:
                entry.stat()
            except OSError:  # it leads nowhere, in a circle, or where this process may not read
                self._listing.broken += 1
                return True
        return False

    def _sort_and_drop_repeated(self) -> None:
        """Sort the files, those of linked folders among them, and drop links to files that are listed already."""
        identities = dict(zip(self._listing.paths, self._listing.identities(), strict=True))
        seen = {identity for path, identity in identities.items() if path not in self._linked_files}
        self._listing.paths = []
        for path in sorted(identities, key=lambda path: path.replace("/", "\0")):
            is_repeated = path in self._linked_files and identities[path] in seen
            (self._listing.repeated if is_repeated else self._listing.paths).append(path)
            seen.add(identities[path])

    @contextmanager
    def _reading(self, folder: str) -> Iterator[str]:
        """Yield the absolute path of a folder, and turn an error of the file system into an `InputError`."""
        absolute = f"{self._listing.root}/{folder}" if folder else self._listing.root
        try:
            yield absolute
        except OSError as error:
            remedy = "allow reading it" if not folder else f"allow reading it, or move it out of {self._listing.root}"
            raise InputError(f"{absolute} cannot be read ({error.strerror}); {remedy}") from error


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...], *, is_folder: bool) -> bool:
    """Return whether the path of a file matches a pattern; or that of a folder, whether files below may match."""
    if parts and pattern == _ALL:  # most often
        return True
    if not parts or not pattern:
        return not parts and is_folder == bool(pattern)
    if pattern[0] == "**":
        rest = _matches(parts, pattern[1:], is_folder=is_folder)
        return rest or _matches(parts[1:], pattern, is_folder=is_folder)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:], is_folder=is_folder)


def _has(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except (OSError, ValueError):  # such as a name above 255 bytes, a null character, or a folder without permission
        return False


def _identity(path: str) -> _Identity:
    status = Path(path).stat()
    return status.st_dev, status.st_ino
