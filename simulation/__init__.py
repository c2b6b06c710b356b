"""The engines that run the unchanged ServerApp and ClientApp, and the command ``fedssl``."""

import os

from fedssl.command_line import check_packages
from fedssl.machine.process import OPENMP_ENV, OPENMP_THREADS

check_packages()  # the command does so itself; here for notebooks, whose folder comes first in the import path

# before flwr is imported: no telemetry
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
# before ray is imported: under `uv run --project DIR` it would require DIR to be the working directory
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.update(OPENMP_ENV | os.environ | OPENMP_THREADS)  # before torch is imported
