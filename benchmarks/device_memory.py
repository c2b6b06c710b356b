"""Memory and time of a device with one core, within a memory cgroup.

    uv run python benchmarks/device_memory.py --encoders conv_small resnet18 --limits 1000 600

A fleet on loopback, with TLS and node keys: the SuperLink and a second device with four images run outside of the
cgroup, all processes of the measured device inside. It trains on 96x96 JPEG images of this script, resized to 64x64.
Prints the peak of the cgroup (with pages of files, which the kernel frees when it needs memory; at most the limit), the
peak of its memory without files, the peak of each kind of process (PSS, in which shared pages are divided), the median
seconds of the rounds after the first and of training in them, and the number of processes killed. A device that is
killed is dropped from the round, with the printed reason.

Files count for the cgroup that reads them first. ``--installation FOLDER`` is an environment that no other process
uses, so that its libraries count for the device; its files are removed from the page cache first.
"""

import json
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.common import make_parser
from tests.fleet import INSTALLATION, fleet
from tests.memory_cgroup import MemoryCgroup, memory_cgroup

MB = 10**6
KINDS = {  # by a part of the command
    "resident process": b"client_app.resident_process",
    "ClientApp": b"flwr-clientapp",
    "SuperExec": b"flower-superexec",
    "SuperNode": b"flower-supernode",
}
RUN = ["local_epochs=1", "evaluation=none", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]
RUN += ["dataset=folder", "dataset.size=64", "device=cpu", "num_clients=2", "aggregation.min_updates=1"]


@dataclass
class Peaks:
    """Peaks of a device in bytes: of its memory without files, of the PSS of each kind of process, and of their sum."""

    anonymous: int = 0
    together: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--encoders", nargs="+", default=["conv_small", "resnet18"])
    parser.add_argument("--limits", nargs="+", type=int, default=[1000], help="of the cgroup, in MB (10^6 bytes)")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--installation", type=Path, default=INSTALLATION)
    parser.add_argument("--overrides", nargs="*", default=[], help="of the run, such as batch_size=16")
    options = parser.parse_args()
    for encoder in options.encoders:
        for limit in options.limits:
            overrides = [*RUN, f"encoder={encoder}", f"rounds={options.rounds}", *options.overrides]
            print(f"{encoder} {' '.join(options.overrides)} within {limit} MB", flush=True)
            measure(overrides, limit=limit * MB, images=options.images, installation=options.installation)


def measure(overrides: Sequence[str], *, limit: int, images: int, installation: Path) -> None:
    """Run a fleet and print the measurements of the device within the limit."""
    if installation != INSTALLATION:
        evict_files(installation)
    with tempfile.TemporaryDirectory() as name, memory_cgroup(limit) as group:
        folder = Path(name)
        with fleet("small", "other") as running, sampled(group) as peaks:
            for device, number in (("small", images), ("other", 4)):
                write_photos(folder / "images" / device, number)
                prefix = group.command(["taskset", "-c", "0"]) if device == "small" else ()
                config = {"data_path": folder / "images" / device, "client_name": device, "state_path": folder / device}
                running.start_node(
                    device, prefix=prefix, installation=installation if device == "small" else INSTALLATION, **config
                )
            running.wait_for_nodes(2)
            status, output = running.run(*overrides, f"output_dir={folder / 'run'}")
            assert status == 0, output
            running.nodes["small"].poll()
            survived = running.nodes["small"].returncode is None
            peak, kills = group.peak(), group.oom_kills()
        report(folder / "run", peaks, peak=peak, kills=kills, survived=survived)


def report(run: Path, peaks: Peaks, *, peak: int, kills: int, survived: bool) -> None:
    number = json.loads((run / "devices.json").read_text()).get("small")  # None: killed before it joined
    rows, clients = read_lines(run / "metrics.jsonl"), read_lines(run / "clients.jsonl")
    trained = {row["round"]: row["seconds"] for row in clients if row["client"] == number}
    each = ", ".join(f"{kind} {value / MB:.0f}" for kind, value in peaks.kinds.items())
    print(f"  peak {peak / MB:.0f} MB, without files {peaks.anonymous / MB:.0f} MB, PSS {peaks.together / MB:.0f} MB")
    print(f"  PSS by process, MB: {each}")
    print(f"  {len(trained)} of {len(rows)} rounds with the device, {kills} processes killed", end="")
    print("" if survived else ", the SuperNode ended")
    later = [row["seconds"] for row in rows[1:] if row["round"] in trained]
    if later:
        training = statistics.median(seconds for number, seconds in trained.items() if number > 1)
        print(
            f"  {statistics.median(later):.1f} s per round, training {training:.1f} s; first {rows[0]['seconds']:.1f} s"
        )
    for reason in sorted({row["dropped"][str(number)] for row in rows if str(number) in row["dropped"]}):
        print(f"  dropped: {reason}", flush=True)
    for reason in json.loads((run / "fleet.json").read_text())["rejected"].values():
        print(f"  does not take part: it {reason}", flush=True)


@contextmanager
def sampled(group: MemoryCgroup, *, seconds: float = 0.1) -> Iterator[Peaks]:
    """Yield peaks that a thread updates until the end of the block."""
    peaks, stop = Peaks(), threading.Event()

    def sample() -> None:
        while not stop.wait(seconds):
            peaks.anonymous = max(peaks.anonymous, group.anonymous())
            sizes = dict.fromkeys(KINDS, 0)
            for pid in group.pids():
                with suppress(OSError, StopIteration):  # it has ended, or is not one of these
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                    sizes[next(kind for kind, part in KINDS.items() if part in command)] += pss(pid)
            peaks.kinds = {kind: max(size, peaks.kinds.get(kind, 0)) for kind, size in sizes.items()}
            peaks.together = max(peaks.together, sum(sizes.values()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def pss(pid: int) -> int:
    """Return the proportional set size of a process in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def evict_files(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def write_photos(folder: Path, number: int) -> None:
    """Write random JPEG images of 96 x 96 pixels."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for place in range(number):
        small = Image.fromarray(random.integers(256, size=(12, 12, 3), dtype=np.uint8))
        small.resize((96, 96)).save(folder / f"{place:04}.jpg")


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    main()
