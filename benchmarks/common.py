"""Command line and timing of the benchmarks; does not import torch, which some scripts configure first."""

import argparse
import time
from collections.abc import Callable, Mapping


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of the script."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def time_in_turn(
    jobs: Mapping[str, Callable[[], object]],
    *,
    turns: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return seconds of every job, one number per turn; jobs are interleaved, and ``warmup`` turns are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(turns + warmup):
        for name, job in jobs.items():
            start = clock()
            job()
            seconds[name].append(clock() - start)
    return {name: values[warmup:] for name, values in seconds.items()}
