"""Rounds of 300 tiny clients: one process against two of Ray, alternating in one run.

    uv run python benchmarks/many_clients.py [key=value ...]        # two minutes; progress goes to standard error

The digits (8 x 8 images, 3 to 4 of them per client), ``conv_small`` with a width of 4, one thread per process. Odd
rounds run in this process, even ones on Ray, so that both have the same neighbors on a busy machine. The first two
rounds, in which the processes start, are not counted. Numbers are medians of 5 rounds. CPU seconds are those of this
process, of the actors, and of Ray's other processes.

Target: a round on Ray takes at most 0.6 of the time in one process, on a quiet machine with two vCPUs of one core.
"""

import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import ray
from flwr.app import Message

from benchmarks.common import make_parser
from fedssl.config.load import load_settings
from server_app.app import execute
from server_app.build import build_run
from server_app.exchanges.sums import SumTask
from simulation.grid import LocalGrid, load_client_app
from simulation.ray_grid import RayGrid
from simulation.ray_session import ray_session
from simulation.resources import ClientResources
from simulation.sandbox import sandbox_pids

CLIENTS, ROUNDS = 300, 12
SETTINGS = [f"num_clients={CLIENTS}", f"clients_per_round={CLIENTS}", f"rounds={ROUNDS}", "partition=iid", "threads=1"]
SETTINGS += ["encoder.width=4", "device=cpu", "evaluation=none", "final_evaluation=none", "collapse_images=0"]
SETTINGS += ["strategy=l_dawa", "measure_resources=false", f"checkpoint_every={ROUNDS}"]


def cpu_seconds() -> Counter[str]:
    """Return the CPU seconds of this process, of the actors, and of Ray's other processes."""
    tick, seconds = os.sysconf("SC_CLK_TCK"), Counter[str]()
    sandbox = Path(ray._private.worker.global_worker.node.get_session_dir_path()).parents[1]
    for pid in [os.getpid(), *sandbox_pids(sandbox)]:
        with suppress(OSError):  # it has ended
            name, fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
            part = "server" if pid == os.getpid() else "actors" if "ray::ClientAct" in name else "Ray"
            seconds[part] += sum(map(int, fields.split()[11:13])) / tick
    return seconds


class AlternatingGrid(RayGrid):
    """A grid whose clients run in this process in odd rounds. ``cpu`` has the CPU seconds when each round starts."""

    def __init__(self) -> None:
        super().__init__(num_clients=CLIENTS, placements=["SPREAD"] * 2, client=ClientResources(1, 0.0))
        self._local = LocalGrid(load_client_app(), num_clients=CLIENTS)
        self.cpu: list[Counter[str]] = []

    @property
    def _is_local(self) -> bool:
        return len(self.cpu) % 2 == 1

    def sum_updates(self, task: SumTask | None) -> None:
        super().sum_updates(None if len(self.cpu) % 2 == 0 else task)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.cpu.append(cpu_seconds())
        return self._local.push_messages(messages) if self._is_local else super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._local.pull_messages(message_ids) if self._is_local else super().pull_messages(message_ids)


def main() -> None:
    _, overrides = make_parser(__doc__).parse_known_args()
    print(f"{os.cpu_count()} cores, load before start {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr), ray_session(gpus=0):
        settings = load_settings([*SETTINGS, *overrides, "engine=ray", f"output_dir={folder}/run"])
        grid = AlternatingGrid()
        execute(grid, build_run(grid, settings), client_cores=2)
        grid.cpu.append(cpu_seconds())
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        seconds = [json.loads(line)["seconds"] for line in lines]
    used = [after - before for before, after in zip(grid.cpu, grid.cpu[1:], strict=False)]  # positive parts
    for name, first in (("one process", 2), ("Ray", 3)):
        rounds = range(first, len(seconds), 2)
        parts = ", ".join(
            f"{part} {statistics.median(used[r][part] for r in rounds):.2f}" for part in ("server", "actors", "Ray")
        )
        print(f"{name:12}{statistics.median(seconds[r] for r in rounds):6.2f} s; CPU seconds: {parts}")
    ratios = [on_ray / local for local, on_ray in zip(seconds[2::2], seconds[3::2], strict=True)]
    print(f"Ray/one process {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
