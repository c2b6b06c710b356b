"""FedSSL-Bench: 18 rules and five methods under one protocol. Repeat the command to continue unfinished runs.

    uv run python benchmarks/bench.py --suite cpu --data '/my/cifar10/*.parquet' --minutes 240

Runs the rows without an entry in fedssl_bench/results.json, cheap rows first and seed 0 before the others, one run per
core. Adds the results to that file and prints the tables of all entries. `--dry-run` measures two rounds of one row and
estimates the time of the suite. `--write-partitions` draws the recorded partitions again.
"""

import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from benchmarks.common import make_parser
from benchmarks.fedssl_bench import partitions
from benchmarks.fedssl_bench.results import RESULTS, collect, merge, read, results_page
from benchmarks.fedssl_bench.running import Job, Runner
from benchmarks.fedssl_bench.suites import SUITES, Suite
from fedssl.config.load import compose
from fedssl.datasets.base import load_federated
from fedssl.machine.process import available_cores
from fedssl.partition import make_partition, write_partition


def make_jobs(suite: Suite, data: str, folder: Path, *, done: Collection[tuple[str, str, str, int]] = ()) -> list[Job]:
    """Return the runs of a suite that are not ``done``: by seed, rules before methods, cheap runs first."""
    ordered = sorted(suite.rows, key=lambda row: (row.stage, row.cost))
    return [
        Job(
            f"{row.folder}, seed {seed}",
            folder / row.folder / str(seed),
            tuple(suite.arguments(row, seed, data, folder / "partitions")),
            row.cost,
        )
        for seed in suite.seeds
        for row in ordered
        if (suite.name, row.rule, row.method, seed) not in done
    ]


def write_partitions(data: str) -> None:
    """Draw the partitions of all suites, and write them with their digests."""
    texts: dict[str, str] = {}
    for suite in (suite for suite in SUITES.values() if suite.recorded):
        for seed in suite.seeds:
            overrides = [*suite.overrides, *suite.data(data), f"seed={seed}", f"num_clients={suite.clients}"]
            settings = compose([*overrides, "partition=dirichlet", f"partition.alpha={suite.alpha}"])
            image_data = load_federated(settings.data)
            parts = make_partition(settings.partition, image_data).client_indices
            texts[suite.partition(seed)] = write_partition(parts, image_data.labels)
    partitions.write_parquet(texts)
    partitions.write_digests(texts)


def estimate_minutes(suite: Suite, data: str, folder: Path) -> float:
    """Estimate the minutes of a run of cost 1 from runs of one and two rounds."""
    row = next(row for row in suite.rows if row.cost == 1 and row.partitioned)
    overrides = suite.arguments(row, suite.seeds[0], data, folder / "partitions")
    rounds = compose(overrides).rounds
    seconds = []
    for number in (1, 2):
        with tempfile.TemporaryDirectory() as scratch:
            job = Job(f"dry run of {number} rounds", Path(scratch) / "run", (*overrides, f"rounds={number}"), 1.0)
            start = time.monotonic()
            if Runner(jobs=1, seconds=3600).run([job]):
                sys.exit("the dry run failed")
            seconds.append(time.monotonic() - start)
    return (seconds[0] + (rounds - 1) * (seconds[1] - seconds[0])) / 60


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--suite", choices=SUITES, default="cpu")
    parser.add_argument("--data", default="", help="CIFAR-10, as in dataset.path; not for the digits")
    parser.add_argument("--minutes", type=float, default=240, help="time limit, after which runs are stopped")
    parser.add_argument("--jobs", type=int, help="number of concurrent runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="of the run folders")
    parser.add_argument("--again", action="store_true", help="repeat runs that have an entry in results.json")
    parser.add_argument("--dry-run", action="store_true", help="estimate the time of the suite")
    parser.add_argument("--write-partitions", action="store_true", help="draw the partitions again")
    arguments = parser.parse_args()
    suite, folder = SUITES[arguments.suite], (arguments.folder / arguments.suite).absolute()
    if (suite.recorded or arguments.write_partitions) and not arguments.data:
        sys.exit(f"suite {suite.name} needs CIFAR-10; add --data '/my/cifar10/*.parquet'")
    if arguments.write_partitions:
        write_partitions(arguments.data)
        return
    parallel = arguments.jobs or suite.jobs or available_cores()
    if suite.recorded:
        partitions.write_csv([suite.partition(seed) for seed in suite.seeds], folder / "partitions")
    known = [] if arguments.again else read(RESULTS)
    todo = make_jobs(suite, arguments.data, folder, done={entry.key for entry in known})
    if arguments.dry_run:
        cost = sum(job.cost for job in todo)
        minutes = estimate_minutes(suite, arguments.data, folder)
        print(f"{len(todo)} runs, {minutes:.1f} min for cost 1: {minutes * cost / parallel / 60:.1f} hours")
        return
    try:
        unfinished = Runner(jobs=parallel, seconds=60 * arguments.minutes).run(todo)
    finally:
        merge(RESULTS, collect(suite, folder))
        print(results_page())
    print(f"{unfinished} of {len(todo)} runs are not finished")
    sys.exit(1 if unfinished else 0)


if __name__ == "__main__":
    main()
