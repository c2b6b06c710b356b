"""The Ray engine beside training: a round of ours, an empty round of Flower, and a round of the usual Flower client.

    uv run python benchmarks/ray_engine.py        # 2 to 3 minutes; progress goes to standard error

All three run with 10 clients on two Ray actors of one CPU each, ours on our own grid and the others on Flower's runtime
(`flwr run`); none takes an optimiser step, and the same span is
timed: from the making of the messages to the new global model.
- empty: messages and replies without content, i.e. what Flower and Ray take for themselves, with our loop over replies;
- ours: ResNet-18 with SimCLR's head (11 M weights), L-DAWA, ``local_epochs=0``;
- usual: the app in ``usual_client/``, which for each message builds a ResNet-18 (11 M weights), loads 5,000 pictures of
  32x32 as one tensor from a file, starts a DataLoader with two workers, fetches a batch and sends its ``state_dict``,
  under Flower's own FedAvg.

Targets: ours at most 30 ms per client above the empty round, and at least 5 times into the usual one. Medians, with the
least and the largest in brackets; the first two rounds are left out, in which the actors start.
"""

import json
import os
import statistics
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for what the tests know about Flower's own runtime

from fedssl.settings import EngineSettings, MachineSettings
from simulation.ray_grid import run_ray
from tests.flower import flwr_run

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = 10
WARM_UP, ROUNDS = 2, 20


def ours(folder: Path) -> list[float]:
    """Seconds of our rounds."""
    rounds = WARM_UP + ROUNDS
    words = [f"rounds={rounds}", "encoder=resnet18", "strategy=l_dawa", "local_epochs=0", "threads=1", "device=cpu"]
    words += ["partition=iid", "evaluation=none", "final_evaluation=none", f"checkpoint_every={rounds}"]
    words += [f"num_clients={CLIENTS}", f"output_dir={folder}"]
    with redirect_stdout(sys.stderr):
        run_ray(
            words,
            num_clients=CLIENTS,
            clients_at_a_time=2,
            folder=folder,
            engine=EngineSettings(name="ray", address=None, client_cpus=1, client_gpus=None),
            machine=MachineSettings(device="cpu", threads=1, allocator=True, compile_encoder=False),
        )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["clients"] == CLIENTS for line in lines)
    return [line["seconds"] for line in lines][WARM_UP:]


def empty_and_usual(folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of empty rounds and of rounds of the usual client."""
    rounds, pictures = WARM_UP + ROUNDS, folder / "pictures.pt"
    torch.save(torch.rand(5000, 3, 32, 32), pictures)
    words = f"rounds={rounds} pictures={pictures} num_clients={CLIENTS} output_dir={folder}"
    federation = f"num-supernodes={CLIENTS} client-resources-num-cpus=1 init-args-num-cpus=2"
    app = ROOT / "benchmarks" / "usual_client"
    outcome = flwr_run(app, "--run-config", f'overrides="{words}"', "--federation-config", federation)
    print(outcome.log, file=sys.stderr)
    assert outcome.status == "finished:completed", outcome.status
    seconds = json.loads((folder / "summary.json").read_text())["seconds"]
    return seconds["empty"][WARM_UP:], seconds["usual"][WARM_UP:]


def main() -> None:
    print(f"{os.cpu_count()} cores, load before the start {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        empty, usual = empty_and_usual(Path(folder))
        own = ours(Path(folder, "ours"))
    print(f"{CLIENTS} clients, 2 actors{'':12}ms per round     ms per client above the empty round")
    base = statistics.median(empty)
    for name, seconds in {"empty": empty, "ours": own, "usual": usual}.items():
        median = statistics.median(seconds)
        spread = f"({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"
        print(f"{name:16}{median * 1e3:8.0f} {spread:>15} {(median - base) / CLIENTS * 1e3:12.1f}")
    print(f"usual/ours      {statistics.median(usual) / statistics.median(own):8.1f}")


if __name__ == "__main__":
    main()
