"""Read JSON lines while they are written: only what was appended, and everything again after a resumption."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fedssl.safe_io import open_regular_file

CHUNK = 2**24  # bytes at a time
MAX_BYTES = 2**25  # of a file that has been written before; earlier lines are not read
_MARK = 64  # bytes before the position by which another content is detected


class Tail:
    """The lines of a file that have not been read.

    A last line without a line end is read when it is complete. A file that was cut, replaced or removed is read from
    its start.
    """

    def __init__(self, file: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._file, self._max_bytes = file, max_bytes
        self._position, self._mark = 0, b""
        self.unreadable = 0  # lines that are no JSON object
        self.is_cut = False  # whether earlier lines were not read

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether lines that were returned before are void, and the lines of the next chunk."""
        try:
            with open_regular_file(self._file) as stream:
                void = self._restart_if_changed(stream)
                stream.seek(self._position)
                return void, [*self._lines(stream.read(CHUNK))]
        except OSError:  # missing, or not readable
            void = self._position > 0
            self._restart()
            return void, []

    def _restart(self) -> None:
        self._position, self._mark, self.unreadable, self.is_cut = 0, b"", 0, False

    def _restart_if_changed(self, stream: IO[bytes]) -> bool:
        size = os.fstat(stream.fileno()).st_size
        stream.seek(self._position - len(self._mark))
        changed = self._position > 0 and stream.read(len(self._mark)) != self._mark
        if changed or size < self._position:
            self._restart()
        if self._position == 0 and size > self._max_bytes:
            stream.seek(size - self._max_bytes)
            stream.readline(CHUNK)
            self._position, self.is_cut = stream.tell(), True
            self._mark = b""
        return changed

    def _lines(self, content: bytes) -> Iterator[dict[str, Any]]:
        complete = content.rfind(b"\n") + 1 or (len(content) if len(content) == CHUNK else 0)
        content = content[:complete]
        self._position += complete
        self._mark = (self._mark + content)[-_MARK:]
        for line in content.splitlines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield value
            else:
                self.unreadable += 1
