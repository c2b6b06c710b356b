"""What a client keeps between rounds: files on its own disk, one version per round it took part in.

Versions make a resumed run exact: a run that goes back to round r finds what each client had kept before round r + 1,
whatever the client wrote later.

A file is a preface (`_HEADER`), a list of the tensors in JSON, and their bytes, each tensor at a multiple of 64. It is
mapped when it is read, so that a state costs the copy into the model and no more, and nothing in it can be code.
"""

import json
import logging
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from fedssl.atomic_files import atomic_write, mmap_bytes, round_file, saved_rounds
from fedssl.untrusted import MAX_TENSORS_BYTES, check_tensors_like
from strategies.base import ClientState

log = logging.getLogger("fedssl")

STATE_SUFFIX = "state"  # end of the files' names
_HEADER = struct.Struct("<8sQQ40x")  # mark, bytes of the list, sum of all that follows the preface
_MARK = b"fedssl 1"
_ALIGNED = 64
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def load_state(folder: Path, *, before: int, template: Mapping[str, torch.Tensor] | None = None) -> ClientState | None:
    """The state of the last round before round ``before``; None if the client kept nothing until then.

    A damaged one is named in the log and the one before it is used, also where a tensor differs in shape or dtype from
    the one of its name in ``template``, or is not finite.
    """
    for round in reversed(saved_rounds(folder, STATE_SUFFIX)):
        if round < before:
            file = round_file(folder, round, STATE_SUFFIX)
            try:
                state = read_state(file, max_bytes=MAX_TENSORS_BYTES if template is None else _max_bytes(template))
                check_tensors_like(state, template or {})
                return state
            except Exception as error:  # there is no end to how reading a damaged file can fail
                log.warning("%s is damaged (%s); trying the one before", file, error)
    return None


def save_state(folder: Path, state: ClientState, *, round: int, keep_from: int) -> None:
    """Write the state after ``round``, all of it or nothing, and drop versions that no resumed run can ask for.

    Parameters
    ----------
    keep_from : int
        Oldest round that a resumed run may go back to: the newest version up to it stays, older ones go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = [(name, str(value.dtype), list(value.shape)) for name, value in state.items()]
    text = _padded(np.frombuffer(json.dumps(listed).encode(), dtype=np.uint8))
    pieces = [text, *(_padded(value.flatten().view(torch.uint8).numpy()) for value in state.values())]
    preface = _HEADER.pack(_MARK, len(text), sum(map(_sum, pieces)) % 2**64)

    def write(stream: BinaryIO) -> None:
        stream.write(preface)
        stream.writelines(piece.data for piece in pieces)

    atomic_write(round_file(folder, round, STATE_SUFFIX), write)
    reachable = [version for version in saved_rounds(folder, STATE_SUFFIX) if version <= keep_from]
    for version in reachable[:-1]:
        round_file(folder, version, STATE_SUFFIX).unlink(missing_ok=True)


def read_state(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> ClientState:
    """Read one file; the tensors lie in it, for reading only.

    Raises
    ------
    OSError, ValueError
        It is not whole, something else, or larger than ``max_bytes`` bytes.
    """
    content = mmap_bytes(file, max_bytes=max_bytes)
    mark, length, total = _HEADER.unpack_from(content.numpy().data)
    body = content[_HEADER.size :]
    if mark != _MARK or _sum(body.numpy()) != total:
        raise ValueError("it is not as it was written")
    state, start = {}, length
    for name, dtype, shape in json.loads(body[:length].numpy().tobytes().rstrip(b"\0")):
        if not isinstance(name, str) or not all(isinstance(number, int) and number >= 0 for number in shape):
            raise ValueError("its list is not one of tensors")
        size = _DTYPES[dtype].itemsize * math.prod(shape)
        state[name] = body[start : start + size].view(_DTYPES[dtype]).reshape(shape)
        start += -(-size // _ALIGNED) * _ALIGNED
    if start != len(body):
        raise ValueError("its list does not fit its length")
    return state


def _max_bytes(template: Mapping[str, torch.Tensor]) -> int:
    """Bytes that a file may have: an algorithm may keep a few models."""
    return 2**24 + 8 * sum(value.nbytes for value in template.values())


def _padded(piece: np.ndarray) -> np.ndarray:
    """Bytes, with zeros up to a multiple of `_ALIGNED`."""
    rest = -len(piece) % _ALIGNED
    return np.pad(piece, (0, rest)) if rest else piece


def _sum(piece: np.ndarray) -> int:
    """Sum of the bytes in words of eight, which tells a damaged file at the speed of memory."""
    return int(np.add.reduce(piece.view(np.uint64)))
