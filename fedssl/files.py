"""Files that are written whole or not at all, one for each round, and the folder of a new run.

What is written whole takes the place of what is there at once, and a crash leaves that as it was.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from fedssl.errors import InputError


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


def numbered_file(folder: Path, round: int) -> Path:
    """Where the version of a round is, or would be."""
    return folder / f"round-{round:06d}.pt"


def numbered_files(folder: Path) -> list[int]:
    """Rounds of which there is a version, ascending."""
    return sorted(int(file.stem.removeprefix("round-")) for file in folder.glob("round-*.pt"))


def new_run_folder() -> Path:
    """Make a new folder ``runs/<date>_<time>`` at once, so that two runs of the same second do not share it."""
    base = Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    for attempt in range(1000):
        folder = base.with_name(f"{base.name}-{attempt}") if attempt else base
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"the folder {folder} cannot be made ({error.strerror}); set output_dir=...") from error
        return folder
    raise InputError(f"{base} and 999 more folders exist; set output_dir=...")
