"""The logger of all packages, which the console and run folders show."""

import logging
from functools import cache

from fedssl.errors import sanitize

log = logging.getLogger("fedssl")


@cache
def log_once(level: int, line: str) -> None:
    """Log a line, unless this process has logged it already: every split lists the same folder."""
    log.log(level, "%s", sanitize(line))
