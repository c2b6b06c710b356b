"""Tests run side by side, one per core: each keeps to one thread, which they would otherwise fight over."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cifar10",
        metavar="PATH",
        help="CIFAR-10, as dataset.path takes it: read it, and train every method on it (40 CPU minutes)",
    )
    parser.addoption("--heavy", action="store_true", help="run what is marked heavy too ")
    parser.addoption(
        "--record-digests", action="store_true", help="put the numbers of this commit on record (test_digests.py, -n 0)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--heavy"):
        for item in items:
            if item.get_closest_marker("heavy"):
                item.add_marker(pytest.mark.skip(reason="--heavy is not given"))


@pytest.fixture(scope="session")
def cifar10(request: pytest.FixtureRequest) -> str:
    """Where CIFAR-10 is; without it the test is skipped."""
    path = request.config.getoption("--cifar10")
    if not path:
        pytest.skip("--cifar10 names no files")
    return path
