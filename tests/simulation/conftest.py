"""A session of Ray for the tests of a module."""

import pytest


@pytest.fixture(scope="module")
def hosts():
    from simulation.ray_session import ray_session  # here: Ray takes seconds to import

    with ray_session(gpus=4) as hosts:
        yield hosts
