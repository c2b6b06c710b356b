"""Log messages during long waits, and sanitized text of other parties for them."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fedssl import untrusted

log = logging.getLogger("fedssl")

LOG_INTERVAL = 30.0  # seconds between two lines


@contextmanager
def log_while_waiting(what: str) -> Iterator[None]:
    """Log a warning at regular intervals while the block waits."""
    start, done = time.monotonic(), threading.Event()

    def warn() -> None:
        while not done.wait(LOG_INTERVAL):
            log.warning("%s (waiting for %.0f s so far)", what, time.monotonic() - start)

    thread = threading.Thread(target=warn, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def sanitize_line(text: str | None, *, max_chars: int = 300) -> str:
    """Return untrusted text without control characters, cut to ``max_chars``."""
    return untrusted.sanitize((text or "")[:max_chars])
