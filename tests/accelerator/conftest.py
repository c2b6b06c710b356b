"""A child process that has the strict accelerator; the process of the tests has none."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest

from tests.accelerator import device

OnAccelerator = Callable[..., Future[Any]]


@pytest.fixture(scope="session")
def accelerator() -> Iterator[OnAccelerator]:
    """Return a function that starts a call in a process with the devices: of a module's function, with its arguments.

    ``result()`` of what it returns waits for the call, returns what that returned, and raises what it raised. Both
    are pickled: tensors of the devices cannot leave the process.
    """
    if device.compiler() is None:
        pytest.skip("the strict accelerator is a C++ extension, and there is no compiler (g++, or $CXX)")
    device.build()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_start) as process:
        yield process.submit


def _start() -> None:
    device.register()
    from tests.accelerator import stand_in  # imports the project, which finds the device

    stand_in.prepare()
