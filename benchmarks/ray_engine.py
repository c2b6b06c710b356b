"""The Ray engine beside training: a round of ours, an empty round of Flower, and a round of the usual Flower client.

    uv run python benchmarks/ray_engine.py        # 3 to 4 minutes; progress goes to standard error

All three run with 10 clients on two Ray actors of one CPU each, ours on our own grid and the others on Flower's runtime
(`flwr run`); none takes an optimiser step, and the same span is
timed: from the making of the messages to the new global model.
- empty: messages and replies without content, i.e. what Flower and Ray take for themselves, with our loop over replies;
- ours: ResNet-18 with SimCLR's head (11 M weights), L-DAWA, ``local_epochs=0``;
- usual: the app in ``usual_client/``, which for each message builds a ResNet-18 (11 M weights), loads 5,000 images of
  32x32 as one tensor from a file, starts a DataLoader with two workers, fetches a batch and sends its ``state_dict``,
  under Flower's own FedAvg.

Then ours twice more, in a cluster of one host with both actors, and of two hosts with one each (on this machine, as
Ray's own tests make them: replies of the second host are copied from its object store into that of the server).

Targets: ours at most 4 memory passes of a model per client above the empty round, and 5 times into the usual one;
two hosts at most 1.3 times as long as one. A pass is a copy of as many bytes as a model has, measured before and after.
Medians, with the least and the largest in brackets; the first two rounds are left out, in which the actors start.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for what the tests know about Flower's own runtime

from fedssl.config.settings import EngineSettings, MachineSettings
from simulation.ray_grid import run_ray
from tests.flower import flwr_run

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = 10
WARM_UP, ROUNDS = 2, 20


def one_pass(folder: Path) -> float:
    """Seconds of a copy of the bytes that a client sends."""
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    source = np.ones(line["bytes_up"] // CLIENTS // 4, dtype=np.float32)
    copy, seconds = np.empty_like(source), []
    for _ in range(20):
        start = time.perf_counter()
        np.copyto(copy, source)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def in_a_cluster(hosts: int, folder: Path) -> list[float]:
    """Seconds of our rounds on two actors of a cluster of so many hosts, in a process of its own."""
    code = f"from benchmarks.ray_engine import cluster; cluster({hosts}, {str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def cluster(hosts: int, folder: str) -> None:
    """Print the seconds of our rounds in a cluster that ends with this process."""
    from ray.cluster_utils import Cluster

    host = {"num_cpus": 2 // hosts, "object_store_memory": 2**31}
    made = Cluster(initialize_head=True, head_node_args={**host, "include_dashboard": False})
    for _ in range(hosts - 1):
        made.add_node(**host)
    try:
        seconds = ours(Path(folder), address=made.address)
    finally:
        made.shutdown()
    print(json.dumps(seconds))


def ours(folder: Path, *, address: str | None = None) -> list[float]:
    """Seconds of our rounds."""
    rounds = WARM_UP + ROUNDS
    overrides = [f"rounds={rounds}", "encoder=resnet18", "strategy=l_dawa", "local_epochs=0", "threads=1", "device=cpu"]
    overrides += [
        "partition=iid",
        "evaluation=none",
        "final_evaluation=none",
        "collapse_images=0",
        f"checkpoint_every={rounds}",
    ]
    overrides += [f"num_clients={CLIENTS}", f"output_dir={folder}"]
    with redirect_stdout(sys.stderr):
        run_ray(
            overrides,
            num_clients=CLIENTS,
            concurrency=2,
            folder=folder,
            engine=EngineSettings(name="ray", address=address, client_cpus=1, client_gpus=None),
            machine=MachineSettings(device="cpu", threads=1, keep_freed_memory=True, compile_encoder=False),
        )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["clients"] == CLIENTS for line in lines)
    return [line["seconds"] for line in lines][WARM_UP:]


def empty_and_usual(folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of empty rounds and of rounds of the usual client."""
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
    print(f"{os.cpu_count()} cores, load before the start {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        empty, usual = empty_and_usual(Path(folder))
        own = ours(Path(folder, "ours"))
        passes = [one_pass(Path(folder, "ours"))]
        one, two = (in_a_cluster(hosts, Path(folder, f"hosts{hosts}")) for hosts in (1, 2))
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
