"""The Ray engine: our round, an empty round of Flower, and a round of a usual Flower client.

    uv run python benchmarks/ray_engine.py        # 3 to 4 minutes; progress goes to standard error

All have 10 clients on two Ray actors of one CPU each: ours on our grid, the others on Flower's runtime (`flwr run`).
No client takes an optimizer step. The time is measured from the creation of the messages to the new global model.
- empty: messages and replies without content, the cost of Flower and Ray, with our loop over replies.
- ours: ResNet-18 with SimCLR's head (11 M weights), L-DAWA, ``local_epochs=0``.
- usual: the app in ``usual_client/``. For each message it builds a ResNet-18 (11 M weights), loads 5,000 images of
  32x32 as one tensor from a file, starts a DataLoader with two workers, fetches a batch and sends its ``state_dict``,
  under Flower's FedAvg.

Then ours on a Ray cluster with one host of two actors, and with two hosts of one actor each (on this machine, as in
Ray's tests; replies are copied between the object stores).

Targets: ours at most 4 memory passes of a model per client above the empty round, and 5 times faster than the usual
client; two hosts at most 1.3 times the time of one. A pass copies the bytes of a model, measured before and after.
Numbers are medians, with minimum and maximum in parentheses, without the first two rounds, in which the actors start.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import make_parser
from fedssl.config.load import compose
from server_app.build import build_components
from simulation.grid import simulated_clients
from simulation.ray_grid import run_ray
from tests.flower import flwr_run

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = 10
WARM_UP, ROUNDS = 2, 20


def one_pass(folder: Path) -> float:
    """Return the seconds of a copy of the bytes that a client sends."""
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    source = np.ones(line["bytes_up"] // CLIENTS // 4, dtype=np.float32)
    copy, seconds = np.empty_like(source), []
    for _ in range(20):
        start = time.perf_counter()
        np.copyto(copy, source)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def ours_on_cluster(hosts: int, folder: Path) -> list[float]:
    """Return the seconds of our rounds on a cluster of ``hosts`` hosts, in a new process."""
    code = f"from benchmarks.ray_engine import print_ours_on_cluster; print_ours_on_cluster({hosts}, {str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_ours_on_cluster(hosts: int, folder: str) -> None:
    """Print the seconds of our rounds on a cluster that ends with this process."""
    from ray.cluster_utils import Cluster

    host = {"num_cpus": 2 // hosts, "object_store_memory": 2**31}
    cluster = Cluster(initialize_head=True, head_node_args={**host, "include_dashboard": False})
    for _ in range(hosts - 1):
        cluster.add_node(**host)
    try:
        seconds = ours(Path(folder), address=cluster.address)
    finally:
        cluster.shutdown()
    print(json.dumps(seconds))


def ours(folder: Path, *, address: str | None = None) -> list[float]:
    """Return the seconds of our rounds."""
    rounds = WARM_UP + ROUNDS
    overrides = [f"rounds={rounds}", "encoder=resnet18", "strategy=l_dawa", "local_epochs=0", "threads=1", "device=cpu"]
    overrides += ["partition=iid", f"num_clients={CLIENTS}", f"output_dir={folder}", f"checkpoint_every={rounds}"]
    overrides += ["evaluation=none", "final_evaluation=none", "collapse_images=0"]
    overrides += ["engine=ray", "engine.client_cpus=1", *([f"engine.address={address}"] if address else [])]
    with redirect_stdout(sys.stderr):
        settings = compose(overrides)
        run_ray(build_components(settings, simulated_clients(CLIENTS)), settings.machine, concurrency=2)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["clients"] == CLIENTS for line in lines)
    return [line["seconds"] for line in lines][WARM_UP:]


def empty_and_usual(folder: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of empty rounds and of rounds of the usual client."""
    rounds, images = WARM_UP + ROUNDS, folder / "images.pt"
    torch.save(torch.rand(5000, 3, 32, 32), images)
    overrides = f"rounds={rounds} images={images} num_clients={CLIENTS} output_dir={folder}"
    federation = f"num-supernodes={CLIENTS} client-resources-num-cpus=1 init-args-num-cpus=2"
    app = ROOT / "benchmarks" / "usual_client"
    outcome = flwr_run(app, "--run-config", f'overrides="{overrides}"', "--federation-config", federation)
    print(outcome.log, file=sys.stderr)
    assert outcome.status == "finished:completed", outcome.status
    seconds = json.loads((folder / "summary.json").read_text())["seconds"]
    return seconds["empty"][WARM_UP:], seconds["usual"][WARM_UP:]


def main() -> None:
    make_parser(__doc__).parse_args()
    print(f"{os.cpu_count()} cores, load before start {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        empty, usual = empty_and_usual(Path(folder))
        own = ours(Path(folder, "ours"))
        passes = [one_pass(Path(folder, "ours"))]
        one, two = (ours_on_cluster(hosts, Path(folder, f"hosts{hosts}")) for hosts in (1, 2))
        passes.append(one_pass(Path(folder, "ours")))
    print(f"{CLIENTS} clients, 2 actors{'':12}ms per round     ms per client above the empty round")
    base = statistics.median(empty)
    for name, seconds in {"empty": empty, "ours": own, "usual": usual, "one host": one, "two hosts": two}.items():
        median = statistics.median(seconds)
        spread = f"({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"
        print(f"{name:16}{median * 1e3:8.0f} {spread:>15} {(median - base) / CLIENTS * 1e3:12.1f}")
    print(f"usual/ours      {statistics.median(usual) / statistics.median(own):8.1f}")
    print(f"two/one hosts   {statistics.median(two) / statistics.median(one):8.2f}")
    copy = statistics.mean(passes)
    above = (statistics.median(own) - base) / CLIENTS / copy
    print(f"a memory pass of a model: {copy * 1e3:.1f} ms; per client above the empty round: {above:.1f} passes")


if __name__ == "__main__":
    main()
