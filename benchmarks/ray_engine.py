"""The Ray engine beside training: a round of ours, an empty round of Flower, and a round of the usual Flower client.

    uv run python benchmarks/ray_engine.py        # about 2 minutes

All three run for 10 clients on two Ray actors with one CPU each, none takes an optimiser step, and the span is the same:
from the making of the messages to the new global model.
- empty: messages and replies without content, i.e. what Flower and Ray take for themselves; the same loop over replies
  as ours;
- ours: ResNet-18 with SimCLR's head (11 M weights), L-DAWA, ``local_epochs=0``;
- usual: the app in ``usual_client/``, which for each message builds a ResNet-18, loads 5,000 pictures of 32x32 from a
  file, starts a DataLoader with two workers and fetches a batch, and sends its ``state_dict``; Flower's own FedAvg.

Targets: ours at most 30 ms per client above the empty round, and at least 5 times into the usual one. Medians, with the
least and the largest in brackets; the first two rounds are left out, in which actors start and import.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path

import torch

from simulation.flower_run import run

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = 10
ENGINE = {"num_clients": CLIENTS, "client_cpus": 1, "client_gpus": 0.0, "cpus": 2}
WARM_UP = 2
EMPTY, OURS, USUAL = 30, 30, 10  # rounds that count


def ours(folder: Path) -> list[float]:
    """Seconds of our rounds."""
    words = [f"num_clients={CLIENTS}", f"rounds={WARM_UP + OURS}", "local_epochs=0", f"output_dir={folder}"]
    words += ["encoder=resnet18", "partition=iid", "strategy=l_dawa", "threads=1", "device=cpu"]
    words += ["evaluation=none", "final_evaluation=none", "evaluate_every=0", "checkpoint_every=1000"]
    run(ROOT, words, rounds=WARM_UP + OURS, output_dir=folder, **ENGINE)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["clients"] == CLIENTS for line in lines)
    return [line["seconds"] for line in lines][WARM_UP:]


def flowers(folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of empty rounds and of rounds of the usual client."""
    torch.save(torch.randint(256, (5000, 3, 32, 32), dtype=torch.uint8), folder / "pictures.pt")
    words = [f"num_clients={CLIENTS}", f"empty={WARM_UP + EMPTY}", f"usual={WARM_UP + USUAL}"]
    words += [f"output_dir={folder}", f"pictures={folder / 'pictures.pt'}"]
    run(ROOT / "benchmarks/usual_client", words, rounds=2 * WARM_UP + EMPTY + USUAL, output_dir=folder, **ENGINE)
    seconds = json.loads((folder / "summary.json").read_text())["seconds"]
    return seconds["empty"][WARM_UP:], seconds["usual"][WARM_UP:]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        empty, usual = flowers(Path(folder))
        own = ours(Path(folder, "ours"))
    base = statistics.median(empty)
    print(f"\n{CLIENTS} clients, 2 actors{'':8}s per round{'':18}ms per client above the empty round")
    for name, seconds in {"empty": empty, "ours": own, "usual": usual}.items():
        median = statistics.median(seconds)
        above = 1e3 * (median - base) / CLIENTS
        print(f"{name:24}{median:8.3f} ({min(seconds):.3f} to {max(seconds):.3f}) {above:16.1f}")
    print(f"usual/ours{'':14}{statistics.median(usual) / statistics.median(own):8.1f}")
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
