"""How much each mechanism acts on images, and what accuracy does, from the run folders of the suite `digits`.

    uv run python benchmarks/bench.py --suite digits
    uv run python -m benchmarks.mechanisms runs/bench/digits

Strengths are means over rounds, clients and seeds; the difference from FedAvg is paired by seed, with its 95% interval.
`tests/strategies/test_mechanisms.py` has synthetic cases in which each mechanism must act.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, pstdev

from benchmarks.common import make_parser
from client_app.state_store import read_state
from fedssl.command_line import run_command
from fedssl.errors import InputError
from fedssl.report.significance import compare
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import Run, read_run
from fedssl.text_table import markdown
from strategies.fedu import DISTANCE, USE_GLOBAL_PREDICTOR

RESULTS = ("linear_2_per_class", "linear_5_per_class", "linear", "knn")


def l_dawa(run: Run, _: Run) -> dict[str, float]:
    """Return the mean cosine of a weight's layers, and its deviation over clients in % of their mean."""
    cosines: dict[tuple[int, str], list[float]] = defaultdict(list)
    for line in read_jsonl(run.folder / "clients.jsonl"):
        for name, cosine in line["cosine"].items():
            if name.endswith("weight"):
                cosines[line["round"], name].append(cosine)
    spreads = [100 * pstdev(values) / mean(values) for values in cosines.values()]
    return {"cosine {:.3f}": mean(map(mean, cosines.values())), "spread over clients {:.1f}%": mean(spreads)}


def eua(run: Run, _: Run) -> dict[str, float]:
    """Return the smallest change rate over clients along the mean and along EUA's direction; below 0 is a conflict."""
    metrics = [line["strategy_metrics"] for line in read_jsonl(run.folder / "metrics.jsonl")]
    before, after = ([each[f"conflict_{when}"] for each in metrics] for when in ("before", "after"))
    conflicts = mean(100.0 * (rate < 0) for rate in before)
    return {
        "smallest rate {:.2f}": mean(before),
        "with EUA {:.2f}": mean(after),
        "rounds in conflict {:.0f}%": conflicts,
    }


def featarc(run: Run, _: Run) -> dict[str, float]:
    """Return how many clients changed their cluster in a round."""
    metrics = [line["strategy_metrics"] for line in read_jsonl(run.folder / "metrics.jsonl")]
    return {"changes of cluster per round {:.1f}": mean(each["changed_cluster"] for each in metrics)}


def fedu(run: Run, _: Run) -> dict[str, float]:
    """Return DAPU's distance, and how often it took the global predictor, in the stored states of clients."""
    states = [read_state(file) for file in run.folder.glob("clients/**/*.safetensors")]
    return {
        "distance {:.2f}": mean(float(state[DISTANCE]) for state in states),
        "global predictor {:.0f}%": 100 * mean(bool(state[USE_GLOBAL_PREDICTOR]) for state in states),
    }


def layer_wise(run: Run, reference: Run) -> dict[str, float]:
    """Return costs relative to training end to end."""
    own, other = (list(read_jsonl(each.folder / "metrics.jsonl")) for each in (run, reference))
    up = sum(line["bytes_up"] for line in own) / sum(line["bytes_up"] for line in other)
    flops = sum(line["cost"]["flops"] for line in own) / sum(line["cost"]["flops"] for line in other)
    return {"bytes up {:.2f}x": up, "FLOPs {:.2f}x": flops}


MECHANISMS: dict[str, Callable[[Run, Run], dict[str, float]]] = {
    "simclr-l_dawa": l_dawa,
    "simclr-eua": eua,
    "simclr-featarc": featarc,
    "simclr-fedu": fedu,
    "byol-fedu": fedu,
    "simclr-layer-wise": layer_wise,
}


def mechanism_table(folder: Path) -> str:
    """Return the table of the mechanisms with finished runs of two seeds; raises `InputError` without any."""
    lines = [["row", "mechanism", *RESULTS, "seeds"]]
    for row, measure in MECHANISMS.items():
        pairs = [pair for seed in range(5) if (pair := _pair(folder, row, seed))]
        if len(pairs) > 1:
            strengths = [measure(run, reference) for run, reference in pairs]
            texts = [name.format(mean(each[name] for each in strengths)) for name in strengths[0]]
            cells = [_difference(pairs, name) for name in RESULTS]
            lines.append([row.replace("-", " ", 1), ", ".join(texts), *cells, str(len(pairs))])
    if len(lines) == 1:
        raise InputError(
            f"{folder} has no finished runs of two seeds of a row and of FedAvg; give the folder of suite digits, "
            "such as runs/bench/digits"
        )
    return markdown(lines, left=2)


def _pair(folder: Path, row: str, seed: int) -> tuple[Run, Run] | None:
    """Return the finished run of a row and that of FedAvg with the same method and seed."""
    folders = [folder / name / str(seed) for name in (row, f"{row.partition('-')[0]}-fedavg")]
    runs = [read_run(each) for each in folders if (each / "summary.json").is_file()]
    return (runs[0], runs[1]) if len(runs) == 2 and all(run.finished for run in runs) else None


def _difference(pairs: Sequence[tuple[Run, Run]], name: str) -> str:
    differences = [100 * (run.results[name].value - other.results[name].value) for run, other in pairs]
    found = compare({name: differences})[name]
    return f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f})"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="of the suite's runs")
    print(mechanism_table(parser.parse_args().folder))


if __name__ == "__main__":
    sys.exit(run_command("mechanisms", main))
