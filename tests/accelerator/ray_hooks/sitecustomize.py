"""Imported by every process of Python that finds this folder first: Ray's workers get the strict accelerator."""

import sys

if any(argument.endswith("default_worker.py") for argument in sys.orig_argv):
    from tests.accelerator import on_ray

    on_ray.prepare_worker()
