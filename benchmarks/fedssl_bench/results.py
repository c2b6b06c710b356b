"""Results of a suite: one JSON file, which users can extend, and the page that is generated from it."""

import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.fedssl_bench.ranking import differences, friedman, ranks
from benchmarks.fedssl_bench.suites import BOUNDS, SUITES, UNTRAINED, Suite
from fedssl.atomic_files import write_text
from fedssl.evaluation.scores import as_scores
from fedssl.report.significance import POWER, Difference, detectable, seeds_for
from fedssl.runs.run import read_run
from fedssl.text_table import markdown

REFERENCE = "fedavg"
PROTOCOLS = ("linear", "knn")  # ranked by the first
_RANKED = "linear"
RESULTS = Path(__file__).parent / "results.json"
_HEAD = Path(__file__).parent / "results_head.md"


@dataclass(frozen=True)
class BenchResult:
    """The result of one run. ``results`` and ``untrained`` map protocols to accuracies in [0, 1]."""

    suite: str
    rule: str
    method: str
    seed: int
    results: dict[str, float]
    untrained: dict[str, float]  # of the encoder before training
    bytes_up: float  # uploaded by one client in all rounds
    machine: str
    date: str
    versions: dict[str, str]

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Return the run; there is one entry per run."""
        return self.suite, self.rule, self.method, self.seed


def collect(suite: Suite, folder: Path) -> list[BenchResult]:
    """Return the entries of a suite's finished runs. Their folders are ``folder/<row>/<seed>``."""
    entries = []
    for row in suite.rows:
        for seed in suite.seeds:
            run = folder / row.folder / str(seed)
            summary = read_run(run).summary if run.is_dir() else None
            if summary is None or summary["status"] != "finished":
                continue
            accuracies = {
                name: {key: score.value for key, score in as_scores(scores, summary["units"]).items()}
                for name, scores in summary["final"].items()
            }
            entries.append(
                BenchResult(
                    suite=suite.name,
                    rule=row.rule,
                    method=row.method,
                    seed=seed,
                    results=accuracies["federated"],
                    untrained=accuracies["untrained"],
                    bytes_up=summary["client"]["bytes_up"],
                    machine=machine(),
                    date=date.fromtimestamp((run / "summary.json").stat().st_mtime).isoformat(),
                    versions=summary["versions"],
                )
            )
    return entries


def read(file: Path) -> list[BenchResult]:
    """Return the entries of a file; exit if one is invalid. A missing file has none."""
    entries = []
    for number, entry in enumerate(json.loads(file.read_text())["results"] if file.exists() else []):
        try:
            entries.append(BenchResult(**entry))
        except TypeError as error:
            sys.exit(f"{file}: entry {number} has other keys than the rest: {error}; correct it")
    return entries


def merge(file: Path, entries: Iterable[BenchResult]) -> list[BenchResult]:
    """Add entries to the file, where they replace those of the same runs. Return all entries."""
    by_key = {entry.key: entry for entry in [*read(file), *entries]}
    merged = [by_key[key] for key in sorted(by_key)]
    write_text(file, json.dumps({"results": [asdict(entry) for entry in merged]}, indent=1) + "\n")
    return merged


def machine() -> str:
    """Return the name of the processor, and of the GPU that runs use if there is one."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {torch.cuda.get_device_name()}" if torch.cuda.is_available() else processor


def results_page() -> str:
    """Return the tables of all suites, from `RESULTS`."""
    entries = read(RESULTS)
    return _HEAD.read_text() + "\n".join(page(suite, entries) for suite in SUITES.values())


def page(suite: Suite, entries: Sequence[BenchResult]) -> str:
    """Return the suite's part of `results_page`: a table and the significant differences for each method."""
    entries = [entry for entry in entries if entry.suite == suite.name]
    kind = "the settings of each row were selected on other seeds" if suite.tuned else "untuned"
    lines = [f"## Suite `{suite.name}`: {kind}", ""]
    for method in dict.fromkeys(row.method for row in suite.rows):
        of_method = _by_rule(suite, [entry for entry in entries if entry.method == method])
        if of_method:
            seeds = ", ".join(str(entry.seed) for entry in next(iter(of_method.values())))
            lines += [f"### `method={method}`, seeds {seeds}", "", _table(of_method), *_significance(of_method), ""]
    return "\n".join(lines if entries else [*lines, "Not run yet.", ""])


def _by_rule(suite: Suite, entries: Sequence[BenchResult]) -> dict[str, list[BenchResult]]:
    """Return the entries of each rule in the order of the suite, for the seeds that all rules have."""
    rules = dict.fromkeys(row.rule for row in suite.rows)
    by_rule = {rule: [entry for entry in entries if entry.rule == rule] for rule in rules}
    by_rule = {rule: each for rule, each in by_rule.items() if each}
    common = set(suite.seeds).intersection(*({entry.seed for entry in each} for each in by_rule.values()))
    if not common:
        return {}
    return {rule: [entry for entry in each if entry.seed in common] for rule, each in by_rule.items()}


def _values(rows: Mapping[str, Sequence[BenchResult]], protocol: str) -> dict[str, list[float]]:
    """Return the accuracies in % of all ranked rows, in the order of seeds."""
    return {
        rule: [100 * entry.results[protocol] for entry in sorted(each, key=lambda entry: entry.seed)]
        for rule, each in rows.items()
        if rule not in (*BOUNDS, UNTRAINED)
    }


def _table(rows: Mapping[str, Sequence[BenchResult]]) -> str:
    values = _values(rows, _RANKED)
    rank = ranks(values) if values else {}
    beside = differences(values, reference=REFERENCE) if REFERENCE in values else {}
    body = []
    for rule, each in rows.items():
        cells = [_median_and_range([100 * entry.results[name] for entry in each]) for name in PROTOCOLS]
        gain = mean(100 * (entry.results[_RANKED] - entry.untrained[_RANKED]) for entry in each)
        difference = beside.get(rule)
        cells += [
            f"{gain:+.1f}",
            *_difference_cells(difference),
            f"{rank[rule]:.1f}" if rule in rank else "",
            f"{median(entry.bytes_up for entry in each) / 1e6:.0f}",
        ]
        body.append([f"({rule})" if rule in (*BOUNDS, UNTRAINED) else rule, *cells])
    compared = [f"difference to {REFERENCE}", "95% interval", "p", "effect", "seeds"]
    heads = ["strategy", "linear, %", "kNN, %", "above untrained", *compared, "rank", "MB up"]
    return markdown([heads, *body], left=1)


def _difference_cells(difference: Difference | None) -> list[str]:
    if difference is None:
        return [""] * 5
    return [
        f"{difference.mean:+.1f} ± {difference.spread:.1f}",
        f"{difference.low:+.1f} to {difference.high:+.1f}",
        f"{difference.p:.2f}",
        f"{difference.effect:+.1f}",
        str(seeds_for(difference.spread)),
    ]


def _median_and_range(numbers: Sequence[float]) -> str:
    spread = f" ({min(numbers):.1f}-{max(numbers):.1f})" if len(numbers) > 1 else ""
    return f"{median(numbers):.1f}{spread}"


def _significance(rows: Mapping[str, Sequence[BenchResult]]) -> list[str]:
    values = _values(rows, _RANKED)
    p = friedman(values)
    beside = differences(values, reference=REFERENCE) if REFERENCE in values else {}
    significant = [rule for rule, difference in beside.items() if difference.p < 0.05]
    lines = []
    if p is not None:
        lines.append(f"Friedman's test over the {len(values)} strategies: p = {p:.2g}.")
    if beside:
        named = ", ".join(f"`{rule}`" for rule in significant) if significant else "none"
        lines.append(f"Significantly different from `{REFERENCE}` (p < 0.05 after Holm's correction): {named}.")
        spread, seeds = median(difference.spread for difference in beside.values()), len(values[REFERENCE])
        lines.append(
            f"{seeds} seeds detect a difference of {detectable(spread, seeds=seeds):.1f} points with probability "
            f"{POWER:g}, if its deviation is the median one ({spread:.1f}) and no other row is compared."
        )
    return ["", " ".join(lines)] if lines else []
