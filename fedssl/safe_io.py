"""Reading of files that may be damaged or malicious; their declarations are validated before use.

Only regular files up to a maximum size are opened. YAML may have neither aliases nor unlimited depth. The arrays of an
archive need no more memory than the size of the archive. No file can name code. `sanitize` prepares text for a
terminal, a log, a table or a figure.
"""

import argparse
import io
import os
import pickle
import pickletools
import stat
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping, Set
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import yaml

from fedssl.digests import checksum
from fedssl.errors import InputError, error_of_path, reason_of, sanitize

FilePath = str | Path

MAX_TEXT_BYTES = 2**22  # bytes of a file with settings or a summary
MAX_LINES_BYTES = 2**30  # of a file with one line per round, client or image
MAX_TENSORS_BYTES = 2**36  # of an archive with unknown content
_MAX_PICKLE_BYTES = 2**24  # of the list of an archive's tensors
LFS_POINTER = b"version https://git-lfs"  # begins a text in place of a file
CHECKSUM_COMMENT = "# xxh3 "  # begins the first line of settings that a run saved
_MAX_DEPTH = 32  # of nested values

# Globals in the pickle of `torch.save` for plain values and strided tensors.
_ALLOWED_GLOBALS = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict"}
_STORAGES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_ALLOWED_GLOBALS |= {f"torch {kind}Storage" for kind in _STORAGES}
_SCRIPT_GLOBALS = {"torch._utils _rebuild_parameter", "torch._utils _rebuild_tensor", "argparse Namespace"}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # of torch's format before zip files: five pickles, then the storages
_LEGACY_PICKLES = 5


def corrupt_file_error(file: Path, problem: str) -> InputError:
    """Build the error for a damaged file."""
    return InputError(f"{file} cannot be used ({problem}); restore it from a copy, or exclude this folder")


def valid_text(name: str) -> str:
    """Return the name of a file, which may have any bytes, as text that UTF-8 can encode."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def sanitize_line(text: str | None, *, max_chars: int = 300) -> str:
    """Return text without control characters, cut to ``max_chars``."""
    return sanitize((text or "")[:max_chars])


def open_regular_file(file: FilePath, *, max_bytes: int = MAX_TENSORS_BYTES) -> BufferedReader:
    """Open a file for reading, without blocking; an OSError if it is not regular, not readable or too large."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    problem = "it is not a regular file" if not stat.S_ISREG(status.st_mode) else None
    if problem is None and status.st_size > max_bytes:
        problem = f"it has {status.st_size:,} bytes but the maximum is {max_bytes:,}"
    if problem is not None:
        os.close(descriptor)
        raise OSError(0, problem, str(file))
    return os.fdopen(descriptor, "rb")


def read_bytes(file: FilePath, *, max_bytes: int) -> bytes:
    """Read a file; an OSError as of `open_regular_file`."""
    with open_regular_file(file, max_bytes=max_bytes) as stream:
        return stream.read(max_bytes + 1)  # the file may grow


def read_start(file: FilePath, num_bytes: int) -> bytes:
    """Read the first bytes of a file; an OSError as of `open_regular_file`."""
    with open_regular_file(file) as stream:
        return stream.read(num_bytes)


def read_text(file: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str | None:
    """Read a text file, UTF-8; None if it does not exist, `InputError` if it is not readable text."""
    try:
        return str(read_bytes(file, max_bytes=max_bytes), encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise corrupt_file_error(file, "it is not UTF-8 text") from error
    except (OSError, ValueError) as error:  # ValueError: a name may contain a null character
        denied = error_of_path(error) if isinstance(error, PermissionError) else None
        raise denied or corrupt_file_error(file, reason_of(error)) from error


def checksum_line(text: str) -> str:
    """Return the first line of a file with this text, by which `read_yaml` detects damage."""
    return CHECKSUM_COMMENT + checksum(text.encode())


def read_yaml(file: Path, kind: type, *, empty: Any = None) -> Any:
    """Read plain data of this type from a YAML file; interpolations stay text. As `read_text` otherwise.

    ``empty`` is the content of a file with comments alone, if that is valid.
    """
    text = read_text(file)
    if text is None:
        return None
    first, _, body = text.partition("\n")
    if first.startswith(CHECKSUM_COMMENT) and first != checksum_line(body):
        raise corrupt_file_error(file, "its checksum is wrong: it was edited or is damaged")
    try:
        content = load_plain_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise corrupt_file_error(file, f"it is not valid YAML: {reason_of(error)}") from error
    content = empty if content is None else content
    if not isinstance(content, kind):
        raise corrupt_file_error(file, f"it contains a {type(content).__name__} instead of a {kind.__name__}")
    return content


def load_plain_yaml(text: str) -> Any:
    """Return the plain data of YAML; raises `yaml.YAMLError`, `ValueError` or `RecursionError`."""
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except (KeyError, AttributeError) as error:  # of PyYAML, for a tag whose value has another form: !!bool x
        raise ValueError("the value of a tag has another form") from error


def read_tensors(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES, training_script: bool = False) -> Any:
    """Read dictionaries, lists, plain values and tensors that `torch.save` wrote, on the CPU.

    With ``training_script`` also parameters and an `argparse.Namespace`, which checkpoints of training scripts have,
    and torch's format before zip files.
    Raise an OSError if the file cannot be opened or is larger than ``max_bytes``; ValueError, RuntimeError, and errors
    of reading an archive if it contains anything else.
    """
    with open_regular_file(file, max_bytes=max_bytes) as stream:
        if stream.read(4) != b"PK\x03\x04":
            if training_script:
                return _read_legacy_tensors(stream)
            raise ValueError("it is not an archive of tensors")
        with open_archive(stream) as archive:
            (listed,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
            if listed.file_size > _MAX_PICKLE_BYTES:
                raise ValueError("its list of tensors is too long")
            allowed = _ALLOWED_GLOBALS | (_SCRIPT_GLOBALS if training_script else set())
            deque(_operations(archive.read(listed), allowed), maxlen=0)
        size = os.fstat(stream.fileno()).st_size
        stream.seek(0)
        _check_tensors(_load(stream, device="meta"), size, values=listed.file_size)
        stream.seek(0)
        return _load(stream, device="cpu")


def _load(stream: IO[bytes], *, device: str) -> Any:
    """Load tensors and plain values, whose names `_operations` has validated."""
    import torch

    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(stream, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:  # its text advises to allow code
        raise ValueError("it has more than tensors and plain values") from error


class _WithoutDescriptor(io.FileIO):
    """A file that torch reads in Python, without the attempt to unpack a tar file."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation


def _read_legacy_tensors(stream: BufferedReader) -> Any:
    """Read a file of torch before version 1.6. Storages take memory only when their bytes are read."""
    stream.seek(0)
    if stream.read(1) != b"\x80":
        raise ValueError("it is not a file of torch.save")
    stream.seek(0)
    for number in range(_LEGACY_PICKLES):
        start = stream.tell()
        names = [argument for _, argument in _operations(stream, _ALLOWED_GLOBALS | _SCRIPT_GLOBALS)]
        if number == 0 and _LEGACY_MAGIC not in names:
            raise ValueError("it is not a file of torch.save")
        if number == _LEGACY_PICKLES - 2:
            values = stream.tell() - start
    size = os.fstat(stream.fileno()).st_size
    data = size - stream.tell()
    with io.BufferedReader(_WithoutDescriptor(os.dup(stream.fileno()), "rb")) as python_file:
        python_file.seek(0)
        content = _load(python_file, device="cpu")
        end = python_file.tell()
    num_bytes, count = _check_tensors(content, data, values=values)
    if end != size or num_bytes + 8 * count != data:  # a storage that is not in the file has uninitialized memory
        raise ValueError("its tensors do not have the size of the file")
    return content


def check_tensors_like(tensors: Mapping[str, Any], template: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if a tensor differs in shape or dtype from that name's in ``template``, or is not finite."""
    from torch import Tensor, stack

    for name in tensors.keys() & template.keys():
        value, expected = tensors[name], template[name]
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (expected.shape, expected.dtype):
            actual = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} is {actual} instead of {expected.dtype} {tuple(expected.shape)}")
        # `aminmax` propagates NaN and reads the tensor once, without the temporary tensors of `isfinite`.
        if value.numel() and not stack(value.aminmax()).isfinite().all():
            raise ValueError(f"{name} has values that are not finite")


def iter_leaves(value: Any) -> Iterator[Any]:
    """Yield all keys and values of nested mappings, lists and tuples, except the containers."""
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(item, argparse.Namespace):
            item = vars(item)
        if isinstance(item, Mapping):
            yield from item
            stack += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list | tuple):
            stack += [(inner, depth + 1) for inner in item]
        else:
            yield item


class _PlainLoader(yaml.SafeLoader):
    """Loader that rejects aliases, which expand a few lines to gigabytes, and unlimited depth."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it contains an alias")
        nested = self.check_event(yaml.CollectionStartEvent)
        self._depth += nested
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= nested
        return node


def open_archive(stream: IO[bytes]) -> zipfile.ZipFile:
    """Open an archive with uncompressed, non-overlapping members and correct checksums."""
    archive = zipfile.ZipFile(stream)
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("its members are compressed")
    if sum(entry.file_size for entry in entries) > os.fstat(stream.fileno()).st_size:
        raise ValueError("its members overlap")
    corrupt = archive.testzip()
    if corrupt:
        raise ValueError(f"the checksum of {corrupt} is wrong")
    return archive


def _operations(listed: bytes | IO[bytes], allowed: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the operations of a pickle with their arguments; raise a `ValueError` for a global that is not allowed."""
    for code, argument, place in pickletools.genops(listed):
        if code.name in ("STACK_GLOBAL", "INST") or (code.name == "GLOBAL" and argument not in allowed):
            raise ValueError(f"it names {argument or 'a global'}, which is not a tensor")
        if place is not None and place > _MAX_PICKLE_BYTES:
            raise ValueError("its list of tensors is too long")
        yield code.name, argument


def _check_tensors(content: Any, size: int, *, values: int) -> tuple[int, int]:
    """Reject tensors that need more memory than the size of the file, and values that are not plain.

    Return the bytes and the number of storages.
    """
    from torch import Tensor

    storages: dict[int, int] = {}
    for count, value in enumerate(iter_leaves(content)):
        if count > values:  # repeated references count each time
            raise ValueError("its values are referenced too often")
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage._cdata] = max(value.numel() * value.itemsize, storage.nbytes())
            if storages[storage._cdata] > size:
                raise ValueError("a tensor is larger than the file")
        elif value is not None and not isinstance(value, str | int | float):
            raise ValueError(f"it contains a {type(value).__name__}")
    if sum(storages.values()) > size:
        raise ValueError("its tensors are larger than the file")
    return sum(storages.values()), len(storages)
