"""Comparative claims of the five papers, and what our own rows say about each.

    uv run python -m benchmarks.claims

`fedssl_bench/claims.yaml` lists what we found in the papers (without supplements; of LW-FedSSL with appendices) and the
nearest rows of ours. This command computes the outcome of each claim from the entries of results.json and
studies.jsonl, writes `fedssl_bench/claims.csv`, and prints counts.

The difference A - B is paired by seed, in points. If it is significant (p < 0.05, Holm's correction over the
comparisons of a paper), the claim is *confirmed*, or the *opposite* is. Otherwise there is *no difference* if the
95% interval is within one point, and else it is *undecided*. Parity is confirmed by an interval within one point.
Claims without rows that share two seeds are *not tested*.
"""

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import study
from benchmarks.common import make_parser
from benchmarks.fedssl_bench.results import RESULTS, read
from benchmarks.fedssl_bench.suites import ALL, SINGLE
from fedssl.atomic_files import write_text
from fedssl.report.paper_table import PAPERS_FOLDER
from fedssl.report.significance import Difference, compare
from fedssl.text_table import markdown

FOLDER = Path(__file__).parent / "fedssl_bench"
CLAIMS, TABLE = FOLDER / "claims.yaml", FOLDER / "claims.csv"
OUTCOMES = ("confirmed", "opposite", "no difference", "undecided", "not tested")
CONFIRMED, OPPOSITE, NONE, UNDECIDED, NOT_TESTED = OUTCOMES
NAMES = {"l_dawa": "L-DAWA", "fedu": "FedU", "fedu2": "FedU2", "dec_ssl": "Dec-SSL", "lw_fedssl": "LW-FedSSL"}
MARGIN = 1.0  # points
LEVEL = 0.05

Address = str  # SUITE/METHOD/ROW or STUDY/PART/ROW
Rows = Mapping[Address, Mapping[int, Mapping[str, float]]]  # to results of seeds
Comparison = tuple[Address, Address, str]  # two rows and a result


@dataclass(frozen=True)
class Claim:
    """A is above B in a setting, or, with ``relation`` "equal", like B."""

    paper: str
    place: str
    a: str
    relation: str
    b: str
    setting: str
    metric: str
    numbers: tuple[float, float] | None  # of the paper
    comparisons: tuple[Comparison, ...] = ()  # of our rows, the first of which that has results is taken
    differs: str = ""
    note: str = ""


def read_rows() -> dict[Address, dict[int, dict[str, float]]]:
    """Return the accuracies of all our rows in %, by seed; of studies those with the selected learning rates."""
    rows: dict[Address, dict[int, dict[str, float]]] = defaultdict(dict)
    for entry in read(RESULTS):
        rows[f"{entry.suite}/{entry.method}/{entry.rule}"][entry.seed] = entry.results
    entries = [*study.read().values()]
    rates = {name: study.best_rates(name, entries) for name in study.STUDIES}
    for run in entries:
        best = rates[run.study]
        if run.part != "tuning" and run.rate == best.get(run.row, best.get("l_dawa")):
            rows[f"{run.study} study/{run.part}/{run.row}"][run.seed] = run.results
    return rows


def read_claims() -> list[Claim]:
    """Return the listed claims in the order of the papers."""
    content = yaml.safe_load(CLAIMS.read_text())
    claims = [claim for statement in content["tables"] for claim in _of_table(statement)]
    for figure in content["figures"]:
        a, b, result = figure.pop("ours", (None, None, None))
        numbers, setting = figure.pop("paper_numbers", None), figure.pop("setting")
        cells = figure.pop("cells", {"": numbers})
        claim = Claim(
            **{"relation": "above"} | figure, setting="", numbers=None, comparisons=((a, b, result),) if a else ()
        )
        for cell, pair in cells.items():
            name = f"{setting}, {cell}" if cell else setting
            claims.append(replace(claim, setting=name, numbers=tuple(pair) if pair else None))
    return sorted(claims, key=lambda claim: list(NAMES).index(claim.paper))


def _of_table(statement: Mapping[str, Any]) -> Iterator[Claim]:
    paper, _, name = statement["table"].partition(".")
    table = yaml.safe_load((PAPERS_FOLDER / f"{paper}.yaml").read_text())["tables"][name]
    if "across" in statement:
        yield from _of_columns(statement, paper, table)
        return
    pairs = statement.get("pairs") or [(a, b) for a in statement["a"] for b in statement["b"]]
    for column in statement.get("columns", range(len(table["columns"]))):
        sources = statement.get("ours", {}).get(column, [])
        for a, b in ((table["rows"][a], table["rows"][b]) for a, b in pairs):
            numbers = [_number(row["numbers"][column]) for row in (a, b)]
            if None in numbers:
                continue
            settings = {key: value for key, value in table["columns"][column].items() if key != "result"}
            comparisons = [_comparison(source, a, b) for source in ([sources] if isinstance(sources, str) else sources)]
            yield Claim(
                paper,
                statement["place"],
                _label(a),
                statement.get("relation", "above"),
                _label(b),
                ", ".join([statement["setting"], *(f"{key}={value}" for key, value in settings.items())]),
                table["columns"][column]["result"],
                (numbers[0], numbers[1]),
                tuple(one for one in comparisons if one),
                statement.get("differs", ""),
            )


def _of_columns(statement: Mapping[str, Any], paper: str, table: Mapping[str, Any]) -> Iterator[Claim]:
    """Return claims that compare two columns within a row; A and B have the settings in which these differ."""
    for row in (table["rows"][index] for index in statement["rows"]):
        for columns in statement["across"]:
            a, b = (table["columns"][column] for column in columns)
            names, common = [_label(row), _label(row)], [statement["setting"]]
            for key in (key for key in a if key != "result"):
                if a[key] == b[key]:
                    common.append(f"{key}={a[key]}")
                else:
                    names = [f"{name}, {key}={column[key]}" for name, column in zip(names, (a, b), strict=True)]
            yield Claim(
                paper,
                statement["place"],
                names[0],
                statement.get("relation", "above"),
                names[1],
                ", ".join(common),
                a["result"],
                (_number(row["numbers"][columns[0]]), _number(row["numbers"][columns[1]])),
            )


def _number(text: object) -> Any:
    return None if text is None else float(str(text).partition(" ± ")[0])


def _label(row: Mapping[str, Any]) -> str:
    label = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
    return f"{label}, untrained" if "encoder_kind" in row else label


def _comparison(source: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison | None:
    """Return two of our rows by the settings of the paper's; ``*`` is the method of each, by default BYOL."""
    suite, method, result = source.split("/")
    expected = "simclr" if suite.endswith("study") else method
    rows = []
    for row in (a, b):
        own = str(row["settings"].get("method", "byol" if method == "*" else expected)).split("/")[-1]
        if "encoder_kind" in row or expected not in ("*", own):
            return None
        rows.append(f"{suite}/{own if method == '*' else method}/{_row(row['settings'])}")
    return rows[0], rows[1], result


def _row(settings: Mapping[str, Any]) -> str:
    """Return the name of our row with these settings; one that does not exist has no results."""
    weighting = settings.get("strategy.weighting", "uniform")
    strategy = str(settings.get("strategy", "fedavg")) + ("" if weighting == "uniform" else f" by {weighting}")
    if settings.get("num_clients") == 1:
        return ALL
    if strategy == "local_only":
        return SINGLE
    if str(settings.get("experiment", "")).endswith("fedmoco_lw"):
        return "layer-wise"
    regularizer = settings.get("regularizer", "none")
    return strategy if regularizer == "none" else f"{strategy} + {regularizer}"


def paired(rows: Rows, comparison: Comparison) -> list[float]:
    """Return the differences A - B in points over the seeds that both rows have."""
    a, b, result = comparison
    seeds = sorted(rows.get(a, {}).keys() & rows.get(b, {}).keys())
    both = [(rows[a][seed], rows[b][seed]) for seed in seeds]
    return [100 * (ours[result] - theirs[result]) for ours, theirs in both if result in ours and result in theirs]


def tested(claims: Iterable[Claim], rows: Rows) -> dict[tuple[str, Comparison], Difference]:
    """Return the comparisons with two seeds or more by paper, each once; tests of a paper are corrected together."""
    found: dict[str, dict[Comparison, list[float]]] = defaultdict(dict)
    for claim in claims:
        if one := chosen(claim, rows):
            found[claim.paper][one] = paired(rows, one)
    results: dict[tuple[str, Comparison], Difference] = {}
    for paper, values in found.items():
        compared = compare({"\t".join(one): row for one, row in values.items()})
        results |= {(paper, one): compared["\t".join(one)] for one in values}
    return results


def chosen(claim: Claim, rows: Rows) -> Comparison | None:
    """Return the first comparison of a claim with two seeds."""
    return next((one for one in claim.comparisons if len(paired(rows, one)) > 1), None)


def outcome(relation: str, difference: Difference | None) -> str:
    """Return what the difference A - B says about a claim."""
    if difference is None:
        return NOT_TESTED
    within = max(-difference.low, difference.high) < MARGIN
    significant = difference.p < LEVEL
    if relation == "equal":
        return CONFIRMED if within else OPPOSITE if significant else UNDECIDED
    if significant:
        return CONFIRMED if difference.mean > 0 else OPPOSITE
    return NONE if within else UNDECIDED


def table(claims: Sequence[Claim], rows: Rows) -> list[dict[str, str]]:
    """Return the lines of the CSV file."""
    found = tested(claims, rows)
    lines = []
    for claim in claims:
        comparison = chosen(claim, rows)
        difference = found[claim.paper, comparison] if comparison else None
        line = {
            "paper": NAMES[claim.paper],
            "place": claim.place,
            "a": claim.a,
            "relation": claim.relation,
            "b": claim.b,
        }
        line |= {"setting": claim.setting, "metric": claim.metric}
        a, b = claim.numbers or (None, None)
        gain = None if a is None or b is None else a - b
        line |= {"paper_a": _text(a), "paper_b": _text(b), "paper_difference": _text(gain)}
        line |= {"outcome": outcome(claim.relation, difference)}
        line |= dict.fromkeys(
            ("row_a", "row_b", "result", "seeds", "difference", "low", "high", "p", "paper_excluded"), ""
        )
        if comparison and difference:
            line |= dict(zip(("row_a", "row_b", "result"), comparison, strict=True))
            line |= {"seeds": str(len(paired(rows, comparison))), "p": f"{difference.p:.3f}"}
            line |= {"difference": _text(difference.mean), "low": _text(difference.low), "high": _text(difference.high)}
            excluded = gain is not None and not difference.low <= gain <= difference.high
            line |= {"paper_excluded": "" if gain is None else "yes" if excluded else "no"}
        lines.append(line | {"differs": claim.differs if comparison else "", "note": claim.note})
    return lines


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def to_text(lines: Sequence[Mapping[str, str]]) -> str:
    """Return the CSV file."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()


def against(lines: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the claims that the numbers of the paper's own table contradict."""
    return [line for line in lines if line["relation"] == "above" and float(line["paper_difference"] or 1) < 0]


def counts(lines: Sequence[Mapping[str, str]]) -> str:
    """Return the table of the number of claims by paper and outcome."""
    number = Counter((line["paper"], line["outcome"]) for line in lines)
    papers = dict.fromkeys(line["paper"] for line in lines)
    body = [[paper, *(str(number[paper, name]) for name in OUTCOMES)] for paper in papers]
    body.append(["all", *(str(sum(number[paper, name] for paper in papers)) for name in OUTCOMES)])
    table = markdown([["paper", *OUTCOMES], *body], left=1)
    contradicted = len(against(lines))
    return f"{table}\n{len(lines)} claims, of which {contradicted} are against the numbers of the paper's own table.\n"


def main() -> None:
    lines = table(read_claims(), read_rows())
    write_text(TABLE, to_text(lines))
    print(counts(lines))


if __name__ == "__main__":
    make_parser(__doc__).parse_args()
    main()
