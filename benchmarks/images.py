"""Decoded images: the time until several processes have them, and the memory of training on many of them.

    uv run python benchmarks/images.py                    # two to three minutes
    uv run python benchmarks/images.py memory 1000000     # ten minutes, 13 GB on disk

The images are random JPEGs of 64 x 64 pixels in parquet files, about as large as those of Tiny ImageNet.
1. ready: four processes request the same images at once, like Ray actors or the jobs of a sweep. Measures the time from
   the start signal until the last process has them, and the sum of the private memory (RssAnon) that this needs.
   Compares memory (``dataset.cache=null``), a new cache file, and an existing cache file.
2. memory: a round of two clients, each with a hundredth of the images. Measures the peak of the private memory of the
   process from the settings to the summary, decoding included, minus that before.
"""

import io
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.common import make_parser

IMAGES, PROCESSES = 20_000, 4
DISTINCT = 500  # images, which repeat
SHARD = 100_000  # images in a file

LOAD = """
import sys
from fedssl.config.load import compose
from fedssl.datasets.base import load_federated
def own_memory():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])
settings, before = compose(sys.argv[1:]).data, own_memory()
print("ready", flush=True)
sys.stdin.readline()
images = load_federated(settings)
print(own_memory() - before, flush=True)
sys.stdin.readline()
"""


def write_images(folder: Path, count: int) -> Path:
    """Write parquet files with ``count`` images into ``folder``, and return it."""
    random, jpegs = np.random.default_rng(0), []
    for _ in range(DISTINCT):
        small = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        encoded = io.BytesIO()
        small.resize((64, 64), Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=75)
        jpegs.append(encoded.getvalue())
    folder.mkdir()
    for shard, start in enumerate(range(0, count, SHARD)):
        chosen = random.integers(DISTINCT, size=min(SHARD, count - start))
        images = pa.DictionaryArray.from_arrays(pa.array(chosen), pa.array(jpegs, pa.binary())).cast(pa.binary())
        table = pa.table({"image": images, "label": chosen % 200})
        pq.write_table(table, folder / f"train-{shard:05d}.parquet", row_group_size=5000, use_dictionary=False)
    return folder


def overrides_for(data: Path, cache: str) -> list[str]:
    return ["dataset=tiny_imagenet", "dataset.splits.test=null", f"dataset.path={data}", f"dataset.cache={cache}"]


def measure_ready(data: Path, cache: str) -> tuple[float, float]:
    """Return seconds until all processes have the images, and the GiB that they need together."""
    command = [sys.executable, "-c", LOAD, *overrides_for(data, cache)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(PROCESSES)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    start = time.perf_counter()
    for child in children:
        print(file=child.stdin, flush=True)
    memory = sum(int(child.stdout.readline()) for child in children) / 2**20
    seconds = time.perf_counter() - start
    for child in children:
        child.communicate("\n")
    return seconds, memory


def print_ready() -> None:
    """Measure part 1, and print it."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_images(Path(folder, "data"), IMAGES)
        rows = {"memory": "null", "new file": f"{folder}/cache", "existing file": f"{folder}/cache"}
        results = {name: measure_ready(data, cache) for name, cache in rows.items()}
    print(f"{IMAGES:,} images, {PROCESSES} processes{'':12}seconds  GiB in memory")
    for name, (seconds, memory) in results.items():
        print(f"{name:40}{seconds:8.2f}{memory:14.2f}")
    before = results["memory"][0]
    print(", ".join(f"{name}: {before / results[name][0]:.1f} times faster" for name in list(rows)[1:]))


def own_memory() -> int:
    """Return RssAnon of this process, in bytes."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list whose only entry is the peak memory of this process in the block, minus that before it."""
    before, peak, ended = own_memory(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], own_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def measure(folder: Path) -> int:
    """Return the bytes of part 2 for the images in ``folder/data``."""
    import torch  # noqa: F401  # the memory of torch and the server is not counted

    import server_app.app  # noqa: F401  # as above
    from simulation.run import run

    overrides = [*overrides_for(folder / "data", str(folder / "cache")), f"output_dir={folder / 'run'}"]
    overrides += ["partition=iid", "num_clients=100", "clients_per_round=2", "rounds=1", "local_epochs=1", "threads=1"]
    overrides += ["encoder.width=4", "device=cpu", "evaluate_every=1", "evaluation=none", "final_evaluation=none"]
    with peak_memory() as peak:
        run(overrides)
    return peak[0]


def memory(count: int, folder: Path) -> int:
    """Return the bytes of part 2 for ``count`` images, measured in a new process."""
    write_images(folder / "data", count)
    measured = subprocess.run([sys.executable, __file__, "measure", folder], stdout=subprocess.PIPE, text=True)
    assert measured.returncode == 0
    return int(measured.stdout.splitlines()[-1])


def print_memory(count: int) -> None:
    """Measure part 2, and print it."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        peak = memory(count, Path(folder))
    pixels = count * 3 * 64 * 64
    print(f"{count:,} images, {pixels / 2**30:.2f} GiB decoded: {peak / 2**30:.2f} GiB of memory, ", end="")
    print(f"{time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("part", nargs="?", choices=("ready", "memory", "measure"), default="ready")
    parser.add_argument("argument", nargs="?", help="memory: number of images; measure: folder (for internal use)")
    options = parser.parse_args()
    if options.part == "ready":
        print_ready()
    elif options.argument is None:
        parser.error(f"{options.part} needs an argument")
    elif options.part == "memory":
        print_memory(int(options.argument))
    else:
        print(measure(Path(options.argument)))


if __name__ == "__main__":
    main()
