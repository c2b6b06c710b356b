"""Long waits that say what they are for."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("fedssl")

SAY_EVERY = 30.0  # seconds between two lines


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Say every now and then what the block waits for."""
    begun, left = time.monotonic(), threading.Event()

    def say() -> None:
        while not left.wait(SAY_EVERY):
            log.warning("%s (waiting for %.0f s so far)", what, time.monotonic() - begun)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
