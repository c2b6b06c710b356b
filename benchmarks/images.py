"""Decoded images: the time until several processes have them, and the memory of training on very many.

    uv run python benchmarks/images.py                    # two to three minutes
    uv run python benchmarks/images.py memory 1000000     # ten minutes, 13 GB on the disk

Images are made up: JPEGs of 64 x 64, about as many bytes each as those of Tiny ImageNet, in parquet files.
1. ready: four processes at once, as Ray's actors or the jobs of a sweep, ask for the same images; the time from the
   word "go" until the last one has them, and the memory of their own (RssAnon: no files) that all of them take for it.
   Into memory (``dataset.cache=null``), into a file that is not there yet, and from a file that is there.
2. memory: a round of two clients, each with a hundredth of the images; the most memory of its own that the process
   has at any moment from the settings to the summary, decoding included, above that before it.
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

IMAGES, PROCESSES = 20_000, 4
KINDS = 500  # different images, which repeat
SHARD = 100_000  # images in a file

LOAD = """
import sys
from fedssl.config.load import compose
from fedssl.datasets.base import load_federated
def own_memory():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])
settings, before = compose(sys.argv[1:]).data, own_memory()
print("here", flush=True)
sys.stdin.readline()
images = load_federated(settings)
print(own_memory() - before, flush=True)
sys.stdin.readline()
"""


def make(folder: Path, count: int) -> Path:
    """Write parquet files with so many images; returns their folder."""
    random, kinds = np.random.default_rng(0), []
    for _ in range(KINDS):
        small = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        encoded = io.BytesIO()
        small.resize((64, 64), Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=75)
        kinds.append(encoded.getvalue())
    folder.mkdir()
    for shard, start in enumerate(range(0, count, SHARD)):
        chosen = random.integers(KINDS, size=min(SHARD, count - start))
        images = pa.DictionaryArray.from_arrays(pa.array(chosen), pa.array(kinds, pa.binary())).cast(pa.binary())
        table = pa.table({"image": images, "label": chosen % 200})
        pq.write_table(table, folder / f"train-{shard:05d}.parquet", row_group_size=5000, use_dictionary=False)
    return folder


def words_for(data: Path, cache: str) -> list[str]:
    return ["dataset=tiny_imagenet", f"dataset.path={data}", f"dataset.cache={cache}"]


def ready(data: Path, cache: str) -> tuple[float, float]:
    """Seconds until all processes have the images, and GiB that they take together."""
    command = [sys.executable, "-c", LOAD, *words_for(data, cache)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(PROCESSES)
    ]
    for child in children:
        assert child.stdout.readline() == "here\n"
    start = time.perf_counter()
    for child in children:
        print(file=child.stdin, flush=True)
    memory = sum(int(child.stdout.readline()) for child in children) / 2**20
    seconds = time.perf_counter() - start
    for child in children:
        child.communicate("\n")
    return seconds, memory


def print_ready() -> None:
    """Part 1."""
    with tempfile.TemporaryDirectory() as folder:
        data = make(Path(folder, "data"), IMAGES)
        rows = {"into memory": "null", "into a file": f"{folder}/cache", "from the file": f"{folder}/cache"}
        found = {name: ready(data, cache) for name, cache in rows.items()}
    print(f"{IMAGES:,} images, {PROCESSES} processes{'':12}seconds  GiB in memory")
    for name, (seconds, memory) in found.items():
        print(f"{name:40}{seconds:8.2f}{memory:14.2f}")
    before = found["into memory"][0]
    print(", ".join(f"{name}: {before / found[name][0]:.1f} times faster" for name in list(rows)[1:]))


def own_memory() -> int:
    """RssAnon of this process, in bytes."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@contextmanager
def most_memory() -> Iterator[list[int]]:
    """The most memory of this process while the block runs, above that before it, as the list's only entry."""
    before, most, ended = own_memory(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], own_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def measure(folder: Path) -> None:
    """Print the bytes of part 2 for the images in ``folder/data``, in a process that has done nothing else."""
    import torch  # noqa: F401  # its memory is not counted, nor the server's

    import server_app.app  # noqa: F401
    from simulation.cli import run

    overrides = [*words_for(folder / "data", str(folder / "cache")), f"output_dir={folder / 'run'}"]
    overrides += ["partition=iid", "num_clients=100", "clients_per_round=2", "rounds=1", "local_epochs=1", "threads=1"]
    overrides += ["encoder.width=4", "device=cpu", "evaluate_every=1", "evaluation=none", "final_evaluation=none"]
    with most_memory() as most:
        run(overrides)
    print(most[0])


def memory(count: int, folder: Path) -> int:
    """Part 2, for so many images; bytes."""
    make(folder / "data", count)
    measured = subprocess.run([sys.executable, __file__, "measure", folder], stdout=subprocess.PIPE, text=True)
    assert measured.returncode == 0
    return int(measured.stdout.splitlines()[-1])


def print_memory(count: int) -> None:
    """Part 2."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        most = memory(count, Path(folder))
    pixels = count * 3 * 64 * 64
    print(f"{count:,} images, {pixels / 2**30:.2f} GiB decoded: {most / 2**30:.2f} GiB of memory, ", end="")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    if "measure" in sys.argv:
        measure(Path(sys.argv[2]))
    elif "memory" in sys.argv:
        print_memory(int(sys.argv[2]))
    else:
        print_ready()
