"""The logger of all packages, which the console and run folders show, and other lines of standard output."""

import logging
from contextlib import suppress
from functools import cache

from fedssl.errors import sanitize

log = logging.getLogger("fedssl")


@cache
def log_once(level: int, line: str) -> None:
    """Log a line, unless this process has logged it already: every split lists the same folder."""
    log.log(level, "%s", sanitize(line))


def print_line(text: str) -> None:
    """Print a line; work goes on if standard output is closed or its disk is full."""
    with suppress(OSError):
        print(text, flush=True)
