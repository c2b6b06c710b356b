"""Undocumented names of Ray 2.55, the version that Flower 1.41 requires."""

from contextlib import AbstractContextManager
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


def keep_sigterm_handler() -> AbstractContextManager[Any]:
    """Let `ray.init` set no handler of SIGTERM in a block: its handlers end the process without a message."""
    return patch("ray._private.utils.set_sigterm_handler", lambda handler: None)
