"""What is said to people: long waits tell what they are for, and words of others are fit to be shown."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fedssl import untrusted

log = logging.getLogger("fedssl")

LOG_INTERVAL = 30.0  # seconds between two lines
RUN_FOLDER_MARKER = "; output in "  # what stands before the run folder in the log


@contextmanager
def log_while_waiting(what: str) -> Iterator[None]:
    """Say every now and then what the block waits for."""
    begun, left = time.monotonic(), threading.Event()

    def say() -> None:
        while not left.wait(LOG_INTERVAL):
            log.warning("%s (waiting for %.0f s so far)", what, time.monotonic() - begun)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def sanitize_line(text: str | None, *, max_chars: int = 300) -> str:
    """Text of somebody else's, as much of it as fits a line, and nothing that a terminal would obey."""
    return untrusted.sanitize((text or "")[:max_chars])
