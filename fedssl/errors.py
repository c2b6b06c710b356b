"""Exceptions whose messages are shown to users, and parts of their messages."""

import errno
import os
from collections.abc import Iterable, Sequence

# Errors of a disk that cannot be written any more.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}

_MAX_LISTED = 5  # items in a message
_MAX_PATH = 120  # characters of a path in a message
_MAX_REASON = 300  # characters of the message of another library
_REMEDIES = {
    errno.ENAMETOOLONG: "a name has at most 255 bytes, and a path 4095; choose a shorter one",
    errno.ENOENT: "correct the path, or create what it names",
    errno.ENOTDIR: "a part of the path is a file; correct it",
    errno.EISDIR: "give the path of a file",
    errno.EEXIST: "remove it, or choose another path",
    errno.ELOOP: "its links lead to each other; remove one of them",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or choose another path or user"),
    errno.EROFS: "choose a path on a disk that can be written",
    errno.EMFILE: "raise the number of open files, e.g. with `ulimit -n 4096`",
    errno.ENFILE: "end programs with many open files",
    errno.EIO: "check the disk",
    errno.EFBIG: "choose a path on another disk, or raise `ulimit -f`",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free disk space"),
}


def sanitize(text: object, *, lines: bool = False) -> str:
    """Replace control characters, which a terminal would execute, by spaces; ``lines`` keeps line breaks."""
    text = str(text)
    if text.isprintable():  # at once, since tables have millions of cells
        return text
    return "".join(char if char.isprintable() or (lines and char == "\n") else " " for char in text)


def reason_of(error: Exception) -> str:
    """Return the message of an error, of any library, on one line of limited length; its class if it has none."""
    known = error.strerror if isinstance(error, OSError) else None
    return known or sanitize(" ".join(str(error).split())[:_MAX_REASON]) or type(error).__name__


class InputError(ValueError):
    """Invalid setting, file or folder: one sentence with what, found, allowed and remedy.

    The command line prints the sentence without a traceback and exits with status 2. Control characters, which names of
    files may have, become spaces.
    """

    def __init__(self, message: object) -> None:
        super().__init__(sanitize(message))


class RunError(RuntimeError):
    """Run that could not be completed; the message is the reason.

    The command line prints it without a traceback and exits with status 1.
    """


class RunStopped(KeyboardInterrupt):
    """Interrupt of a run after ``rounds`` rounds; ``overrides`` continue it."""

    def __init__(self, message: str, *, rounds: int, overrides: Sequence[str]) -> None:
        super().__init__(message)
        self.rounds, self.overrides = rounds, overrides


class RequestRefused(InputError):
    """Request of a server that a device refuses: one sentence, which is sent to the server unchanged.

    It contains values from the server's request and the device's limits, and no other data of the device.
    """


def error_of_path(error: OSError) -> InputError | RunError | None:
    """Return the error with one sentence for a path that cannot be used; None for an error of another kind."""
    path = error.filename if isinstance(error.filename, str) else ""
    if not path and error.errno == errno.ENOENT and _working_folder_is_gone():
        return InputError("the working folder no longer exists; change to another one with cd")
    remedy = _REMEDIES.get(error.errno or 0) or (path and "choose another path, or check the disk or share of it")
    if not remedy:
        return None
    path = path if len(path) <= _MAX_PATH else f"{path[: _MAX_PATH // 2]}...{path[-_MAX_PATH // 2 :]}"
    sentence = f"{path} cannot be used ({error.strerror}); {remedy}" if path else f"{error.strerror}; {remedy}"
    return RunError(sentence) if error.errno in DISK_ERRORS else InputError(sentence)


def _working_folder_is_gone() -> bool:
    try:
        return not os.getcwd()  # noqa: PTH109 - the module imports as little as it can
    except FileNotFoundError:
        return True


def disk_remedy(error: OSError) -> str:
    """Return what to do about a folder that cannot be written."""
    return "make the disk writable" if error.errno == errno.EROFS else _REMEDIES.get(error.errno or 0, "check the disk")


def shortened(items: Iterable[object], *, maximum: int = _MAX_LISTED) -> str:
    """Return the first items in a line, and the number of others."""
    texts = [str(item) for item in items]
    more = len(texts) - maximum
    return ", ".join(texts[:maximum]) + (f" and {more:,} more" if more > 0 else "")
