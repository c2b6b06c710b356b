"""FedSSL-Bench: every rule and every method under one protocol, resumed as often as need be.

    uv run python benchmarks/bench.py --suite cpu --data '/my/cifar10/*.parquet' --minutes 240

Runs rows in the order of their cost, as many at a time as there are cores, with seed 0 first, but for those of which
docs/results.json has an entry; runs that the time ended go on the next time. Results go into that file, where other
entries stay, and docs/results.md is written anew from it. `--dry-run` measures two rounds of one row and tells how long
the suite takes; `--write-partitions` draws the divisions, which lie beside the suites, and their digests.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from benchmarks.fedssl_bench.results import collect, merge, page, read
from benchmarks.fedssl_bench.running import Job, Runner
from benchmarks.fedssl_bench.suites import PARTITIONS, SUITES, Suite
from fedssl.config.load import compose
from fedssl.datasets.base import load_federated
from fedssl.partition import make_partition, write_partition

DOCS = Path(__file__).parents[1] / "docs"
DIGESTS = PARTITIONS / "SHA256SUMS"
TEXT = Path(__file__).parent / "fedssl_bench" / "results_head.md"


def jobs(suite: Suite, data: str, folder: Path, *, done: Collection[tuple[str, str, str, int]] = ()) -> list[Job]:
    """The runs of a suite that are not ``done``: seed by seed, rules before methods, the cheap ones first."""
    ordered = sorted(suite.rows, key=lambda row: (row.stage, row.cost))
    return [
        Job(
            f"{row.place}, seed {seed}",
            folder / row.place / str(seed),
            tuple(suite.arguments(row, seed, data)),
            row.cost,
        )
        for seed in suite.seeds
        for row in ordered
        if (suite.name, row.rule, row.method, seed) not in done
    ]


def digests(suite: Suite) -> dict[str, str]:
    """SHA-256 of every file that divides the images of a suite."""
    files = [suite.division(seed) for seed in suite.seeds]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def check_divisions(suite: Suite) -> None:
    """Refuse divisions that are not those whose digests are on record."""
    known = dict(reversed(line.split()) for line in DIGESTS.read_text().splitlines())
    changed = [name for name, digest in digests(suite).items() if known.get(name) != digest]
    if changed:
        sys.exit(f"{', '.join(changed)}: not the division on record in {DIGESTS}; restore the file")


def write_divisions(data: str) -> None:
    """Draw the divisions of all suites, and put their digests on record."""
    lines: dict[str, str] = {}
    PARTITIONS.mkdir(exist_ok=True)
    for suite in SUITES.values():
        for seed in suite.seeds:
            overrides = [*suite.overrides, *suite.data(data), f"seed={seed}", f"num_clients={suite.clients}"]
            settings = compose([*overrides, "partition=dirichlet", f"partition.alpha={suite.alpha}"])
            image_data = load_federated(settings.data)
            parts = make_partition(settings.partition, image_data).client_indices
            suite.division(seed).write_text(write_partition(parts, image_data.labels))
        lines |= digests(suite)
    DIGESTS.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(lines.items())))


def estimate(suite: Suite, data: str) -> float:
    """Minutes of a run of cost 1, from a run of one round beside a run of none."""
    row = next(row for row in suite.rows if row.cost == 1 and row.shared)
    overrides = suite.arguments(row, suite.seeds[0], data)
    rounds = compose(overrides).rounds
    seconds = []
    for number in (1, 2):
        with tempfile.TemporaryDirectory() as place:
            job = Job(f"dry run of {number} rounds", Path(place) / "run", (*overrides, f"rounds={number}"), 1.0)
            start = time.monotonic()
            if Runner(beside=1, seconds=3600).run([job]):
                sys.exit("the dry run failed")
            seconds.append(time.monotonic() - start)
    return (seconds[0] + (rounds - 1) * (seconds[1] - seconds[0])) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suite", choices=SUITES, default="cpu")
    parser.add_argument("--data", required=True, help="CIFAR-10, as dataset.path takes it")
    parser.add_argument("--minutes", type=float, default=240, help="no run is begun, and none goes on, after these")
    parser.add_argument("--beside", type=int, help="how many runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="of the run folders")
    parser.add_argument("--again", action="store_true", help="run also what docs/results.json has an entry of")
    parser.add_argument("--dry-run", action="store_true", help="tell how long the suite takes")
    parser.add_argument("--write-partitions", action="store_true", help="draw the divisions anew")
    arguments = parser.parse_args()
    suite, folder = SUITES[arguments.suite], (arguments.folder / arguments.suite).absolute()
    beside = arguments.beside or suite.beside or os.cpu_count() or 1
    if arguments.write_partitions:
        write_divisions(arguments.data)
        return
    check_divisions(suite)
    known = [] if arguments.again else read(DOCS / "results.json")
    todo = jobs(suite, arguments.data, folder, done={entry.key for entry in known})
    if arguments.dry_run:
        cost = sum(job.cost for job in todo)
        minutes = estimate(suite, arguments.data)
        print(f"{len(todo)} runs, {minutes:.1f} min for cost 1: {minutes * cost / beside / 60:.1f} hours")
        return
    try:
        left = Runner(beside=beside, seconds=60 * arguments.minutes).run(todo)
    finally:
        entries = merge(DOCS / "results.json", collect(suite, folder))
        (DOCS / "results.md").write_text(TEXT.read_text() + "\n".join(page(one, entries) for one in SUITES.values()))
    print(f"{left} of {len(todo)} runs are left; results are in {DOCS / 'results.md'}")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
