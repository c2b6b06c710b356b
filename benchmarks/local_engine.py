"""The local engine relative to training: overhead of a client, a round against a bare loop, memory of 100 clients.

    uv run python benchmarks/local_engine.py

ResNet-18 (11 M weights). Overhead is the time of a round without training.
1. overhead: per client (target: at most 10 ms).
2. round: a complete round against a bare PyTorch loop with the same optimizer steps on the same images, without
   messages, aggregation or client state (target: at most 1.05x).
3. state: overhead per client that keeps a target network (BYOL: 46 MB): in memory with files written in the background,
   and in files only, as on Ray.
4. memory: a round of 100 clients without training, and the peak memory of the process (target: under 3 s and 1 GB).
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedssl.machine.process import OPENMP_ENV

os.environ.update(OPENMP_ENV | os.environ)  # before torch is imported, as the command fedssl does

import torch

from benchmarks.common import make_parser
from client_app.app import app as client_app
from client_app.state_store import WriteBehind
from client_app.worker import worker_for
from fedssl.config.load import compose, parse_client_config
from fedssl.training import batches
from server_app.app import build_run
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.training_loop import run_round
from simulation.grid import LocalGrid
from strategies.types import ServerState

COMMON = ["encoder=resnet18", "strategy=l_dawa", "partition=iid", "rounds=1000"]


class Federation:
    """Rounds of a federation on the local engine."""

    def __init__(self, *overrides: str, store: WriteBehind | None = None) -> None:
        quiet = ["collapse_images=0", "measure_resources=false", f"output_dir={tempfile.mkdtemp()}"]
        self.settings = compose([*COMMON, *quiet, *overrides])
        self.grid = LocalGrid(client_app, num_clients=self.settings.num_clients, store=store)
        self.components = build_run(self.grid, self.settings)  # also configures threads and allocator
        self.federation = self.components.federation
        self.state = ServerState()

    def __call__(self) -> float:
        """Run a round, and return its seconds."""
        start = time.perf_counter()
        exchange = WallClockExchange(self.grid)
        self.state, self.result = run_round(
            exchange, lambda: self.federation, self.state, oldest_resumable=self.state.round
        )
        exchange.flush()
        return time.perf_counter() - start

    def bare(self) -> float:
        """Run the same optimizer steps in a bare loop on the same model, and return the seconds."""
        client = worker_for(parse_client_config(self.settings.client_yaml))
        generator = torch.Generator().manual_seed(0)
        client.method.train()
        start = time.perf_counter()
        for indices in client.client_indices:
            for batch in batches(torch.as_tensor(indices), client.training.batch_size, generator=generator):
                views = client.training.augment(client.images[batch], generator)
                views = views.with_images([x.contiguous(memory_format=torch.channels_last) for x in views.images])
                client.training.optimizer.zero_grad(set_to_none=True)
                client.method.loss(views).backward()
                client.training.optimizer.step()
        return time.perf_counter() - start


def overhead(repeats: int = 15) -> None:
    """Measure part 1, and print it."""
    federation = Federation("local_epochs=0")
    federation()
    times = [federation() / federation.settings.num_clients for _ in range(repeats)]
    weights = sum(array.size for model in federation.state.models.values() for array in model.layers.values())
    print(f"overhead, {weights / 1e6:.1f} M weights, 10 clients: {1e3 * statistics.median(times):.1f} ms per client")


def complete_round(repeats: int = 5) -> None:
    """Measure part 2, and print it."""
    federation = Federation("local_epochs=1", "num_clients=4", "batch_size=64")
    federation(), federation.bare()
    pairs = [(federation(), federation.bare()) for _ in range(repeats)]
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    ours, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"round, 4 clients: {ours:.2f} s, bare loop {bare:.2f} s, ratio {ratio:.3f}x")


def client_state(repeats: int = 9) -> None:
    """Measure part 3, and print it."""
    with WriteBehind() as behind:
        stores = {"background": behind, "files": None}
        federations = {
            name: Federation("local_epochs=0", "method=byol", "num_clients=4", store=store)
            for name, store in stores.items()
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in stores}
        for _ in range(repeats + 2):
            for name, federation in federations.items():
                federation()  # builds the worker
                cpu, wall = time.process_time(), federation()
                times[name].append((1e3 * wall / 4, 1e3 * (time.process_time() - cpu) / 4))
    medians = {
        name: [statistics.median(column) for column in zip(*pairs[2:], strict=True)] for name, pairs in times.items()
    }
    shown = ", ".join(f"{name} {wall:.1f} ms ({cpu:.1f} of CPU)" for name, (wall, cpu) in medians.items())
    print(f"overhead with a target network, per client: {shown}")


def hundred_clients(repeats: int = 3) -> None:
    """Measure part 4 in a new process, whose peak memory contains nothing else, and print it."""
    federation = Federation("local_epochs=0", "num_clients=100")
    federation()
    seconds = statistics.median(federation() for _ in range(repeats))
    # getrusage would include the memory of the parent process before the fork.
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**20
    print(f"100 clients: {seconds:.2f} s per round, peak memory {peak:.2f} GB", flush=True)


PARTS = {"overhead": overhead, "round": complete_round, "state": client_state, "memory": hundred_clients}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--part", choices=PARTS, help="run only this part, in this process")
    part = parser.parse_args().part
    if part:
        PARTS[part]()
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    overhead()
    complete_round()
    client_state()
    subprocess.run([sys.executable, __file__, "--part", "memory"], check=True)


if __name__ == "__main__":
    main()
