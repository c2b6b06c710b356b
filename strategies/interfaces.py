"""Public names of `strategies.types`, under the name that scripts import."""

from strategies.types import *  # noqa: F403
