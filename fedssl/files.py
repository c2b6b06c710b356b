"""Files that are written whole or not at all: what is there is replaced at once, and a crash leaves it as it was."""

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file under a temporary name beside ``file``, then put it in the place of ``file``."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        write(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a text file, UTF-8."""
    write_whole(file, lambda partial: partial.write_text(text, encoding="utf-8"))
