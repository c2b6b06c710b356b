"""Studies of many rounds: learning rates on separate seeds, then the strategies with their own. Repeat to continue.

    uv run python -m benchmarks.study digits --minutes 240
    uv run python -m benchmarks.study cifar10 --data '/my/cifar10/*.parquet' --minutes 1200 --jobs 2
    uv run python -m benchmarks.study digits --minutes 0 --parts "alpha 0.1" --figure norms.png

Runs what has no entry in fedssl_bench/studies.jsonl, part by part and one process per job, adds the results, and prints
the tables of all entries. `--parts`, `--rows`, `--rates` and `--seeds` select what runs now. An entry has a digest of
the code that produced it, and the tables name entries of other code; `--again` repeats these.
"""

import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import mean, stdev

from benchmarks.common import make_parser
from benchmarks.fedssl_bench.results import machine
from benchmarks.fedssl_bench.running import Job, Runner
from benchmarks.fedssl_bench.studies import STUDIES, Study, StudyJob
from benchmarks.layer_norms import RunNorms
from fedssl.atomic_files import write_text
from fedssl.plots.style import new_figure, write_png
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import read_run
from fedssl.text_table import markdown
from fedssl.wire.device import code_fingerprint

ENTRIES = Path(__file__).parent / "fedssl_bench" / "studies.jsonl"
CODE = code_fingerprint()
Key = tuple[str, str, str, float, int]


@dataclass(frozen=True)
class Entry:
    """The result of one run. Accuracies are in [0, 1], lists have a value per evaluated round."""

    study: str
    part: str
    row: str
    rate: float
    seed: int
    results: dict[str, float]
    untrained: dict[str, float]
    rounds: list[int]  # that were evaluated
    over_rounds: dict[str, list[float]]
    norms: dict[str, list[float]]  # by kind of layers, before training and after the evaluated rounds
    layers: dict[str, list[float]]  # norm of each layer, before and after training
    code: str  # digest of the source files
    date: str
    machine: str
    versions: dict[str, str]
    seconds: float  # of all rounds

    @property
    def key(self) -> Key:
        return self.study, self.part, self.row, self.rate, self.seed


def read() -> dict[Key, Entry]:
    """Return the stored entries by run."""
    lines = ENTRIES.read_text().splitlines() if ENTRIES.exists() else []
    entries = [Entry(**json.loads(line)) for line in lines]
    return {entry.key: entry for entry in entries}


def add(entries: Iterable[Entry]) -> None:
    """Store entries, which replace those of the same runs."""
    merged = read() | {entry.key: entry for entry in entries}
    write_text(ENTRIES, "".join(json.dumps(asdict(merged[key])) + "\n" for key in sorted(merged)))


def folder_of(job: StudyJob, root: Path) -> Path:
    """Return the run folder."""
    return root / job.study / job.part.replace(" ", "_") / f"{job.row}-{job.rate:g}".replace(" ", "_") / str(job.seed)


def prepare(job: StudyJob, root: Path, overrides: Sequence[str]) -> Job:
    """Return the process of a run; a run of other code starts again."""
    folder = folder_of(job, root)
    marker = folder.with_suffix(".code")
    if not (marker.is_file() and marker.read_text() == CODE):
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(CODE)
    return Job(f"{job.part}, {job.row}, lr {job.rate:g}, seed {job.seed}", folder, (*job.overrides, *overrides), 1.0)


def collect(jobs: Iterable[StudyJob], root: Path) -> list[Entry]:
    """Return the entries of finished runs."""
    ran = [(job, folder_of(job, root)) for job in jobs]
    return [entry(job, folder) for job, folder in ran if folder.is_dir() and read_run(folder).finished]


def entry(job: StudyJob, folder: Path) -> Entry:
    """Return the entry of a finished run."""
    run = read_run(folder)
    assert run.summary is not None
    rounds = list(read_jsonl(folder / "metrics.jsonl"))
    lines = [line for line in rounds if "evaluation" in line]
    lines = [{**line["evaluation"], **line.get("collapse", {}), "round": line["round"]} for line in lines]
    over_rounds = {name: [each[name] for each in lines] for name in run.results}
    layers = RunNorms(run)
    kept = [index for index, round in enumerate(layers.rounds) if round in (0, *(each["round"] for each in lines))]
    return Entry(
        *job.key,
        results={name: score.value for name, score in run.results.items()},
        untrained={name: score.value for name, score in run.results_of("untrained").items()},
        rounds=[each["round"] for each in lines],
        over_rounds=over_rounds,
        norms={kind: _rounded([values[index] for index in kept]) for kind, values in layers.norms.items()},
        layers={name: _rounded(values) for name, values in layers.ends.items()},
        code=folder.with_suffix(".code").read_text(),
        date=date.fromtimestamp((folder / "summary.json").stat().st_mtime).isoformat(),
        machine=machine(),
        versions=run.summary["versions"],
        seconds=round(sum(line["seconds"] for line in rounds), 1),
    )


def best_rates(study: str, entries: Iterable[Entry]) -> dict[str, float]:
    """Return the learning rate of each row with the best mean over the seeds of the first part."""
    values: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    first = next(iter(STUDIES[study].parts))
    for each in entries:
        if (each.study, each.part) == (study, first):
            values[each.row][each.rate].append(each.results[STUDIES[study].selected_by])
    return {row: max(rates, key=lambda rate: mean(rates[rate])) for row, rates in values.items()}


def tables(study: str, entries: Sequence[Entry]) -> str:
    """Return a table for each part: accuracies, differences to FedAvg by seed, and norms."""
    parts = []
    rates = best_rates(study, entries)
    for part, definition in STUDIES[study].parts.items():
        of_part = [each for each in entries if (each.study, each.part) == (study, part)]
        groups: dict[tuple[str, float], list[Entry]] = defaultdict(list)
        for each in of_part:
            if definition.rates or each.rate == rates.get(each.row, rates.get("l_dawa")):
                groups[each.row, each.rate].append(each)
        if not groups:
            parts.append(f"## {part}\n\nnot run yet\n")
            continue
        base = {each.seed: each for (row, _), of_row in groups.items() if row == "fedavg" for each in of_row}
        names = list(of_part[0].results)
        head = ["strategy", "lr", "seeds", *(f"{name}, %" for name in names), "to fedavg", *of_part[0].norms]
        body = [_row(key, of_row, names, {} if definition.rates else base, study) for key, of_row in groups.items()]
        parts.append(f"## {part}\n\n{markdown([head, *body], left=1)}{_other_code(of_part)}")
    return "\n".join([f"# {study}, selected by {STUDIES[study].selected_by}\n", *parts])


def _row(
    key: tuple[str, float], entries: Sequence[Entry], names: Sequence[str], base: Mapping[int, Entry], study: str
) -> list[str]:
    selected = STUDIES[study].selected_by
    paired = [100 * (e.results[selected] - base[e.seed].results[selected]) for e in entries if e.seed in base]
    cells = [_mean_and_std([100 * each.results[name] for each in entries]) for name in names]
    norms = [f"{mean(each.norms[kind][-1] for each in entries):.2f}" for kind in entries[0].norms]
    return [
        *(key[0], f"{key[1]:g}", str(len(entries)), *cells),
        _mean_and_std(paired) if paired and key[0] != "fedavg" else "",
        *norms,
    ]


def _other_code(entries: Sequence[Entry]) -> str:
    codes = {each.code: each.date for each in entries if each.code != CODE}
    if not codes:
        return ""
    listed = ", ".join(f"{code} ({sum(each.code == code for each in entries)}, {day})" for code, day in codes.items())
    return f"\nEntries of other code than this ({CODE}): {listed}\n"


def _mean_and_std(values: Sequence[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def draw(study: str, entries: Sequence[Entry], file: Path, part: str) -> None:
    """Plot norms and accuracy over rounds for the rows of a part, means over seeds."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for each in entries:
        if (each.study, each.part) == (study, part):
            groups[f"{each.row}, lr {each.rate:g}"].append(each)
    if not groups:
        sys.exit(f"{study} has no entries of the part {part!r} to plot; run it, or name another one with --parts")
    selected = STUDIES[study].selected_by
    panels = [*next(iter(groups.values()))[0].norms, selected]
    figure = new_figure(height=2.8, width=3 * len(panels))
    for axis, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name, of_row in groups.items():
            if panel == selected:
                curve = [100 * mean(values) for values in zip(*(e.over_rounds[panel] for e in of_row), strict=True)]
                axis.plot(of_row[0].rounds, curve, label=name)
            else:
                curve = [mean(values) for values in zip(*(e.norms[panel] for e in of_row), strict=True)]
                axis.plot([0, *of_row[0].rounds], curve, label=name)
        axis.set_title(f"{panel}, %" if panel == selected else f"norm: {panel}", fontsize=9)
        axis.set_xlabel("round")
    figure.axes[0].legend(fontsize=7)
    write_png(figure, file, dpi=110)


def check_selection(study: Study, **selected: Sequence[object] | None) -> None:
    """Exit if a selected part, row, rate or seed is not in the study."""
    parts = study.parts.values()
    known: dict[str, dict[object, None]] = {
        "parts": dict.fromkeys(study.parts),
        "rows": dict.fromkeys(row for part in parts for row in part.rows),
        "rates": dict.fromkeys(rate for part in parts for rate in part.rates),
        "seeds": dict.fromkeys(seed for part in parts for seed in part.seeds),
    }
    for name, values in selected.items():
        for value in values or ():
            if value not in known[name]:
                listed = ", ".join(map(repr, known[name]))
                sys.exit(f"study: --{name} {value!r} is not in the study; choose from {listed}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("overrides", nargs="*", help="of settings for the machine, e.g. gpu_augmentation=triton")
    parser.add_argument("--data", help="CIFAR-10, as in dataset.path; for the study of CIFAR-10")
    parser.add_argument("--minutes", type=float, default=240, help="time limit; 0: only print tables")
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/studies"), help="of the run folders")
    parser.add_argument("--parts", nargs="+", help="only these parts")
    parser.add_argument("--rows", nargs="+", help="only these rows")
    parser.add_argument("--rates", nargs="+", type=float, help="only these learning rates of the tuning")
    parser.add_argument("--seeds", nargs="+", type=int, help="only these seeds")
    parser.add_argument("--again", action="store_true", help="repeat runs whose entry is of other code")
    parser.add_argument("--figure", type=Path, help="PNG of norms and accuracy over rounds")
    options = parser.parse_args()
    study, root = STUDIES[options.study], options.folder.absolute()
    if options.jobs < 1:
        sys.exit(f"study: --jobs {options.jobs} is not allowed; give at least 1")
    if study.needs_data and options.minutes and not options.data:
        sys.exit(f"{options.study} needs images; add --data '/my/cifar10/*.parquet'")
    check_selection(study, parts=options.parts, rows=options.rows, rates=options.rates, seeds=options.seeds)
    end = time.monotonic() + 60 * options.minutes
    for part in study.parts if options.minutes else ():
        if options.parts and part not in options.parts:
            continue
        jobs = study.jobs(options.study, part, best_rates(options.study, read().values()), options.data)
        add(collect([job for job in jobs if job.key not in read()], root))  # which an interrupted call has finished
        known = read()
        planned = [
            job
            for job in jobs
            if (not options.rows or job.row in options.rows)
            and (not options.seeds or job.seed in options.seeds)
            and (not options.rates or not study.parts[part].rates or job.rate in options.rates)
            and (job.key not in known or (options.again and known[job.key].code != CODE))
        ]
        try:
            Runner(jobs=options.jobs, seconds=end - time.monotonic()).run(
                [prepare(job, root, options.overrides) for job in planned]
            )
        finally:
            add(collect(planned, root))
    entries = list(read().values())
    print(tables(options.study, entries))
    if options.figure:
        draw(options.study, entries, options.figure, options.parts[0] if options.parts else "alpha 0.1")


if __name__ == "__main__":
    main()
