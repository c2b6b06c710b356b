"""The log of a run, on the terminal and in its folder, and what is said when the folder cannot be written any more."""

import errno
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedssl.errors import RunError
from fedssl.untrusted import sanitize
from server_app.screen import PlainConsole

log = logging.getLogger("fedssl")

# What a disk says that takes no more.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


@contextmanager
def log_to(folder: Path, screen: PlainConsole) -> Iterator[None]:
    """Send the lines of the product's logger to the screen and to ``run.log`` in the run folder."""
    file = _LogFile(folder / "run.log")
    handlers: list[logging.Handler] = [screen.handler(), file]
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in handlers:
        handler.setFormatter(_SanitizingFormatter())
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
        log.setLevel(level)
        log.propagate = propagate
    if file.problem is not None:
        raise disk_error(folder, file.problem)


class _SanitizingFormatter(logging.Formatter):
    """Lines without what a terminal would take for a command: clients and files of others have their words in them."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize(super().format(record), lines=True)


class _LogFile(logging.FileHandler):
    """A log that keeps in mind why a line could not be written, instead of a traceback on the terminal for each."""

    problem: OSError | None = None

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.problem = error
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            self.problem = error


@contextmanager
def disk_errors_as_run_error(folder: Path) -> Iterator[None]:
    """Say in one sentence what keeps the files of a run from being written, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise disk_error(folder, error) from error


def disk_error(folder: Path, error: OSError) -> RunError:
    """Make the error for a run folder that cannot be written any more."""
    return RunError(
        f"{folder} cannot be written ({error.strerror or error}); make room there and go on with fedssl resume={folder}"
    )
