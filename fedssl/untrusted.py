"""Files that may be damaged or come from elsewhere, read as data: what they declare is checked before it is used.

Only regular files are opened, none above a size; YAML has no aliases and no depth without end; an archive's arrays need
no more memory than the archive is long; nothing that is read can name code. `sanitize` is for text that goes on to a
terminal, a log, a table or a figure.
"""

import math
import os
import pickletools
import stat
import zipfile
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

from fedssl.errors import InputError

MAX_TEXT_BYTES = 2**22  # bytes of a file with settings or a summary
MAX_LINES_BYTES = 2**30  # of a file with lines of rounds, clients or images
MAX_TENSORS_BYTES = 2**36  # of an archive, where nothing says what is to be in it
_MAX_PICKLE_BYTES = 2**24  # of the list of an archive's tensors
_MAX_DEPTH = 32  # of what is nested in a file

# All that the list of tensors names in what `torch.save` writes of plain values and strided tensors.
_ALLOWED_GLOBALS = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict"}
_STORAGES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_ALLOWED_GLOBALS |= {f"torch {kind}Storage" for kind in _STORAGES}


def corrupt_file_error(file: Path, problem: str) -> InputError:
    """Make the error for a file that is not as it was written."""
    return InputError(f"{file} cannot be used ({problem}); put a good copy of it there, or leave this folder out")


def sanitize(text: object, *, lines: bool = False) -> str:
    """Text without what a terminal would take for a command; with ``lines`` its line breaks stay."""
    return "".join(sign if sign.isprintable() or (lines and sign == "\n") else " " for sign in str(text))


def open_regular_file(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> BufferedReader:
    """Open a regular file for reading; pipes, devices and folders are refused and never waited for.

    Parameters
    ----------
    max_bytes : int
        Bytes.

    Raises
    ------
    OSError
        It is not there, may not be read, is no regular file or is larger.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    problem = "it is no regular file" if not stat.S_ISREG(found.st_mode) else None
    if problem is None and found.st_size > max_bytes:
        problem = f"it has {found.st_size:,} bytes and may have {max_bytes:,}"
    if problem is not None:
        os.close(descriptor)
        raise OSError(0, problem, str(file))
    return os.fdopen(descriptor, "rb")


def read_text(file: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str | None:
    """Read a text file, UTF-8; None if there is none.

    Raises
    ------
    InputError
        It cannot be read, is too large, or is no text.
    """
    try:
        with open_regular_file(file, max_bytes=max_bytes) as stream:
            return str(stream.read(max_bytes + 1), encoding="utf-8")  # it may grow
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise corrupt_file_error(file, "it is not UTF-8 text") from error
    except (OSError, ValueError) as error:  # a name may hold a zero
        raise corrupt_file_error(file, _reason(error)) from error


def read_yaml(file: Path, kind: type) -> Any:
    """Read plain data of this kind from a YAML file: interpolations are text; None if there is no file.

    Raises
    ------
    InputError
        It cannot be read, or holds something else.
    """
    text = read_text(file)
    if text is None:
        return None
    try:
        _check_events(text)
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise corrupt_file_error(file, f"it is no YAML of a run: {_reason(error)}") from error
    if not isinstance(found, kind):
        raise corrupt_file_error(file, f"it holds a {type(found).__name__} instead of a {kind.__name__}")
    return found


def read_tensors(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> Any:
    """Read what `torch.save` wrote of dictionaries, lists, plain values and tensors, on the CPU.

    Raises
    ------
    OSError
        It cannot be opened, or is larger than ``max_bytes`` bytes.
    ValueError, RuntimeError, and what reading an archive raises
        It holds something else.
    """
    import torch

    with open_regular_file(file, max_bytes=max_bytes) as stream:
        if stream.read(4) != b"PK\x03\x04":  # torch would take it for a file of its earlier format
            raise ValueError("it is no archive of tensors")
        with _archive(stream) as archive:
            (listed,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
            if listed.file_size > _MAX_PICKLE_BYTES:
                raise ValueError("its list of tensors is too long")
            _check_names(archive.read(listed))
        size = os.fstat(stream.fileno()).st_size
        stream.seek(0)
        _check_tensors(torch.load(stream, map_location="meta", weights_only=True), size, values=listed.file_size)
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)


def read_arrays(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> dict[str, np.ndarray]:
    """Read what `numpy.savez` wrote of arrays of numbers and words; raises as `read_tensors` does."""
    with open_regular_file(file, max_bytes=max_bytes) as stream, _archive(stream) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as member:
                if np.lib.format.read_magic(member) != (1, 0):
                    raise ValueError(f"{entry.filename} is no array")
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                if dtype.hasobject or math.prod(shape) * dtype.itemsize != entry.file_size - member.tell():
                    raise ValueError(f"{entry.filename} is not as long as it says")
        stream.seek(0)
        with np.load(stream, allow_pickle=False) as content:
            return dict(content)


def iter_leaves(value: Any) -> Iterator[Any]:
    """All keys and values within nested mappings, lists and tuples, themselves left out."""
    waiting = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} times")
        if isinstance(one, Mapping):
            yield from one
            waiting += [(inner, depth + 1) for inner in one.values()]
        elif isinstance(one, list | tuple):
            waiting += [(inner, depth + 1) for inner in one]
        else:
            yield one


def _reason(error: Exception) -> str:
    known = error.strerror if isinstance(error, OSError) else None
    return known or sanitize(" ".join(str(error).split())[:200]) or type(error).__name__


def _check_events(text: str) -> None:
    """Refuse aliases, by which a few lines become gigabytes, and depth without end."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} times")


def _archive(stream: IO[bytes]) -> zipfile.ZipFile:
    """An archive whose members lie in it as they are, side by side, every byte of them as its checksum says."""
    archive = zipfile.ZipFile(stream)
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("its members are compressed")
    if sum(entry.file_size for entry in entries) > os.fstat(stream.fileno()).st_size:
        raise ValueError("its members overlap")
    wrong = archive.testzip()
    if wrong:
        raise ValueError(f"the checksum of {wrong} is wrong")
    return archive


def _check_names(listed: bytes) -> None:
    for code, argument, _ in pickletools.genops(listed):
        if code.name in ("STACK_GLOBAL", "INST") or (code.name == "GLOBAL" and argument not in _ALLOWED_GLOBALS):
            raise ValueError(f"it names {argument or 'something'}, which is no tensor")


def _check_tensors(content: Any, size: int, *, values: int) -> None:
    """Refuse tensors that need more memory than the file is long, and values that are not plain."""
    from torch import Tensor

    storages: dict[int, int] = {}
    for number, value in enumerate(iter_leaves(content)):
        if number > values:  # what is named twice is counted twice
            raise ValueError("its values are named too often")
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage._cdata] = max(value.numel() * value.itemsize, storage.nbytes())
            if storages[storage._cdata] > size:
                raise ValueError("a tensor is longer than the file")
        elif value is not None and not isinstance(value, str | int | float):
            raise ValueError(f"it holds a {type(value).__name__}")
    if sum(storages.values()) > size:
        raise ValueError("its tensors are longer than the file")
