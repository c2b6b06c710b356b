"""Play schedules of faults: ``python -m tests.faults.run``; the exit status is 1 if one breaks an invariant.

180 schedules run in this process (`tests.faults.schedules`), 14 with Ray and 6 with devices (`tests.faults.processes`).
"""

import argparse
import contextlib
import io
import logging
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.processes import play_fleet, play_ray
from tests.faults.schedules import Schedule, make_schedule, play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=180, help="number of schedules in this process")
    parser.add_argument("--ray", type=int, default=14, help="number of schedules with Ray")
    parser.add_argument("--fleet", type=int, default=6, help="number of schedules with devices")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    start, outcomes = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "undisturbed")
        base.mkdir()
        schedules = [make_schedule(number, seed=options.seed) for number in range(options.count)]
        played: list[tuple[str, Callable[[Path], str]]] = [
            *((str(schedule), partial(_play, schedule, base)) for schedule in schedules),
            *((f"ray {number}", partial(play_ray, number)) for number in range(options.ray)),
            *((f"fleet {number}", partial(play_fleet, number)) for number in range(options.fleet)),
        ]
        for index, (name, call) in enumerate(played):
            here = Path(folder, str(index))
            here.mkdir()
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    outcome = call(here)
                print(f"{name}: {outcome}", flush=True)
                outcomes["rejected with one sentence" if outcome.startswith("rejected") else "passed"] += 1
            except Exception:
                print(f"{name}: FAILED\n{traceback.format_exc(limit=-3)}", flush=True)
                outcomes["failed"] += 1
            shutil.rmtree(here, ignore_errors=True)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    print(f"{len(played)} schedules in {time.monotonic() - start:.0f} s: {counts}")
    return int(outcomes["failed"] > 0)


def _play(schedule: Schedule, base: Path, folder: Path) -> str:
    ended = play(schedule, folder / "run", base=base)
    return ended if ended == "equal" else f"rejected: {ended}"


if __name__ == "__main__":
    raise SystemExit(main())
