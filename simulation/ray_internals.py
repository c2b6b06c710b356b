"""Undocumented names of Ray 2.55, the version that Flower 1.41 requires."""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from ray._private.node import Node


def without_services() -> AbstractContextManager[Any]:
    """Let `ray.init` start neither the API server of the dashboard nor the monitor of the autoscaler in a block.

    A private session uses neither. `ray.init` waits for the API server, which ``include_dashboard=False`` starts too,
    and `ray.shutdown` waits a second for the end of both.
    """
    return patch.multiple(
        Node,
        start_api_server=lambda self, *, include_dashboard, raise_on_failure: None,
        start_monitor=lambda self: None,
    )


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Let `ray.init` set no handler of SIGTERM in a block: its handlers end the process without a message.

    That of its C++ code, which calls the former one, also aborts a process that has not ended three seconds later.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with patch("ray._private.utils.set_sigterm_handler", lambda handler: None):
            yield
    finally:
        signal.alarm(0)  # of a signal in the block
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            signal.signal(signal.SIGTERM, handler)
