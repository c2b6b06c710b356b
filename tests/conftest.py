"""Tests run side by side, one per core: each keeps to one thread, which they would otherwise fight over."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
