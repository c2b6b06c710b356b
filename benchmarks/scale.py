"""Cost of the server as a function of clients, participants and model size, and the error of its cost model.

    uv run python benchmarks/scale.py [--clients 10000 100000 1000000] [--participants 10 100 1000]

Runs without training (``local_epochs=0``) of the local engine, each in its own process. The constants of the model in
docs/cluster.md are fitted to all rows by least squares on relative errors. The table has measured and modeled values.

1. clients: time until the first round and peak memory, 10 participants per round.
2. participants and model size: seconds of a round, and peak memory.

The data set is made here: two random images of 8 x 8 pixels per client, so that every client can train.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import make_parser

ENCODERS = {"conv_small width 16": ["encoder.width=16"], "conv_small": [], "ResNet-18": ["encoder=resnet18"]}
_ROUNDS = 3

_DATASET = """
_target_: scale_data.read
splits: {federated: train, train: null, test: null}
number: 1000
channels: 1
size: 8
mean: [0.5]
std: [0.3]
num_classes: 10
limit: null
test_limit: null
"""

_READER = """
import numpy as np
import torch

from fedssl.datasets.base import ImageData
from fedssl.datasets.images import TensorImages


def read(split, *, channels, size, limit, number):
    images = np.random.default_rng(0).integers(0, 256, (number, channels, size, size), dtype=np.uint8)
    return ImageData(TensorImages(torch.from_numpy(images)), torch.arange(number) % 10)
"""


def measure(folder: Path, *overrides: str, clients: int, participants: int) -> dict[str, float]:
    """Run in a process. Return seconds before the first round and of a round, peak memory and bytes of a model."""
    run = folder / "run"
    command = [
        sys.executable,
        "-c",
        "from simulation.cli import main; main()",
        "--config-dir",
        str(folder / "conf"),
        "dataset=scale",
    ]
    command += [f"dataset.number={2 * clients}", "partition=iid", f"num_clients={clients}", f"output_dir={run}"]
    command += ["strategy=l_dawa"]
    command += [f"clients_per_round={participants}", f"rounds={_ROUNDS}", "local_epochs=0", "engine=local"]
    command += ["evaluate_every=0", "final_evaluation=none", "measure_resources=false", *overrides]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit((folder / "log").read_text())
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    subprocess.run(["rm", "-rf", str(run)], check=True)
    return {
        "start": summary["seconds"] - sum(line["seconds"] for line in rounds),
        "round": median(line["seconds"] for line in rounds[1:]),
        "memory": usage.ru_maxrss * 1024,
        "bytes": rounds[-1]["bytes_up"] / participants,
    }


def fit(terms: Sequence[Sequence[float]], measured: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the coefficients of a linear model with the smallest relative errors, and the modeled values."""
    matrix, values = np.array(terms, dtype=float), np.array(measured)
    coefficients = np.linalg.lstsq(matrix / values[:, None], np.ones(len(values)), rcond=None)[0]
    return coefficients, matrix @ coefficients


def print_rows(
    title: str, names: Sequence[str], measured: Sequence[float], modeled: np.ndarray, *, unit: float = 1
) -> None:
    """Print measured and modeled values with their difference in percent."""
    print(f"\n{title}")
    for name, one, other in zip(names, measured, modeled, strict=True):
        print(f"  {name:<42} {one / unit:10.3f} {other / unit:10.3f}  {100 * (other / one - 1):+.0f}%")


def main() -> None:
    """Measure, fit and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--participants", type=int, nargs="+", default=[10, 100, 1000])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedssl-scale-") as name:
        folder = Path(name)
        (folder / "conf" / "dataset").mkdir(parents=True)
        (folder / "conf" / "dataset" / "scale.yaml").write_text(_DATASET)
        (folder / "scale_data.py").write_text(_READER)
        rows = [measure(folder, clients=number, participants=10) for number in options.clients]
        names = [f"{number:,} clients" for number in options.clients]
        terms = [(1, number) for number in options.clients]
        for key, title, unit in (("start", "start [s]", 1.0), ("memory", "memory [GB]", 1e9)):
            measured = [row[key] for row in rows]
            coefficients, modeled = fit(terms, measured)
            print_rows(f"{title}: {coefficients[0]:.3g} + {coefficients[1]:.3g} N", names, measured, modeled, unit=unit)
        pairs = [(number, encoder) for encoder in ENCODERS for number in options.participants]
        rows = [measure(folder, *ENCODERS[encoder], clients=2000, participants=number) for number, encoder in pairs]
        names = [f"{number} participants, {encoder}" for number, encoder in pairs]
        terms = [(1, number, number * row["bytes"]) for (number, _), row in zip(pairs, rows, strict=True)]
        measured = [row["round"] for row in rows]
        c, modeled = fit(terms, measured)
        print_rows(f"round [s]: {c[0]:.3g} + K ({c[1]:.3g} + {c[2]:.3g} P)", names, measured, modeled)
        measured = [row["memory"] for row in rows]
        c, modeled = fit([(1, row["bytes"]) for row in rows], measured)
        print_rows(f"memory [GB]: {c[0]:.3g} + {c[1]:.3g} P", names, measured, modeled, unit=1e9)
        for encoder, row in zip(ENCODERS, rows[:: len(options.participants)], strict=True):
            print(f"P = {row['bytes']:,.0f} bytes: {encoder}")


if __name__ == "__main__":
    main()
