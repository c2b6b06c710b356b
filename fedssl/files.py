"""Files that are written whole or not at all, one for each round, and the folder of a new run.

What is written whole takes the place of what is there at once, and a crash leaves that as it was.
"""

import mmap
import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

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


def read_text(file: Path) -> str | None:
    """Read a text file, UTF-8; None if there is none.

    Raises
    ------
    InputError
        It cannot be read, or is no text.
    """
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise damaged(file, "it is not UTF-8 text") from error
    except OSError as error:
        raise damaged(file, error.strerror or type(error).__name__) from error


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
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise damaged(file, "it is no YAML") from error
    if not isinstance(found, kind):
        raise damaged(file, f"it holds a {type(found).__name__} instead of a {kind.__name__}")
    return found


def damaged(file: Path, problem: str) -> InputError:
    """Make the error for a file that is not as it was written."""
    return InputError(f"{file} cannot be used ({problem}); put a good copy of it there, or leave this folder out")


def mapped(file: Path) -> torch.Tensor:
    """The bytes of a file that is not empty ``(n,)``, uint8, in place and for reading only.

    All processes that map it share the memory; what is too large for the memory is read anew from the disk.
    """
    with file.open("rb") as stream, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)


def remove(file: Path) -> None:
    """Remove a file if there is one; raises `InputError` if something else has its place."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{file} cannot be removed ({error.strerror}); remove it yourself") from error


def numbered_file(folder: Path, round: int, kind: str = "pt") -> Path:
    """Where the version of a round is, or would be; ``kind`` is the end of the name."""
    return folder / f"round-{round:06d}.{kind}"


def numbered_files(folder: Path, kind: str = "pt") -> list[int]:
    """Rounds of which there is a version, ascending."""
    names = (re.fullmatch(rf"round-(\d+)\.{kind}", file.name) for file in folder.glob(f"round-*.{kind}"))
    return sorted(int(name[1]) for name in names if name)


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
