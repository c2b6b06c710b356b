"""Public names of `strategies.types`."""

from strategies.types import *  # noqa: F403 - all of them, under the name that scripts import
