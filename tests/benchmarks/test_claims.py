"""Claims of the papers: outcomes by hand, and the recorded table, computed again."""

import csv
import re
from dataclasses import replace

import pytest

from benchmarks import study
from benchmarks.claims import TABLE, Claim, counts, outcome, paired, read_claims, read_rows, table, to_text
from benchmarks.fedssl_bench.suites import SUITES
from fedssl.config.overrides import CONF
from fedssl.report.significance import compare

CLAIM = Claim("fedu", "Table 0", "A", "above", "B", "here", "linear", (60.0, 50.0), (("s/m/a", "s/m/b", "linear"),))


def rows_of(a: list[float], b: list[float]) -> dict[str, dict[int, dict[str, float]]]:
    rows = {"s/m/a": a, "s/m/b": b}
    return {name: {seed: {"linear": value} for seed, value in enumerate(values)} for name, values in rows.items()}


def test_outcomes_by_hand():
    # Differences 2, 3, 4 points: t = 3 sqrt(3), p = 1 - sqrt(27 / 29) = 0.035, interval 3 -+ 2.48.
    line = table([CLAIM], rows_of([0.52, 0.53, 0.54], [0.5, 0.5, 0.5]))[0]
    assert (line["outcome"], line["difference"], line["low"], line["p"]) == ("confirmed", "3.00", "0.52", "0.035")
    assert (line["paper_difference"], line["paper_excluded"], line["seeds"]) == ("10.00", "yes", "3")
    assert table([CLAIM], rows_of([0.5, 0.5, 0.5], [0.52, 0.53, 0.54]))[0]["outcome"] == "opposite"
    # 1, 2, 3: p = 0.074. -0.1, 0, 0.1: the interval is 0 -+ 0.25, within one point.
    assert table([CLAIM], rows_of([0.51, 0.52, 0.53], [0.5, 0.5, 0.5]))[0]["outcome"] == "undecided"
    near = rows_of([0.499, 0.5, 0.501], [0.5, 0.5, 0.5])
    assert table([CLAIM], near)[0]["outcome"] == "no difference"
    equal = replace(CLAIM, relation="equal")
    assert table([equal], near)[0]["outcome"] == "confirmed"
    assert table([equal], rows_of([0.52, 0.53, 0.54], [0.5, 0.5, 0.5]))[0]["outcome"] == "opposite"


def test_seeds_that_one_row_lacks_do_not_count():
    rows = rows_of([0.6, 0.7], [0.5, 0.5, 0.9])
    assert paired(rows, CLAIM.comparisons[0]) == pytest.approx([10.0, 20.0])
    assert table([CLAIM], rows_of([0.6], [0.5, 0.5]))[0]["outcome"] == "not tested"
    later = replace(CLAIM, comparisons=(("s/m/c", "s/m/b", "linear"), *CLAIM.comparisons))
    assert table([later], rows)[0]["row_a"] == "s/m/a"  # the first source has no entries


def test_comparisons_of_a_paper_are_corrected_together():
    rows = rows_of([0.52, 0.53, 0.54], [0.5, 0.5, 0.5]) | {"s/m/c": {seed: {"linear": 0.4} for seed in range(3)}}
    rows["s/m/c"][2]["linear"] = 0.7
    other = replace(CLAIM, comparisons=(("s/m/c", "s/m/b", "linear"),))
    alone, twice = table([CLAIM], rows), table([CLAIM, CLAIM, other], rows)
    assert (alone[0]["p"], twice[0]["p"], twice[1]["p"]) == ("0.035", "0.070", "0.070")  # each comparison once
    assert twice[0]["outcome"] == "undecided"
    assert table([CLAIM, replace(other, paper="l_dawa")], rows)[0]["p"] == "0.035"  # another paper
    assert outcome("above", compare({"": [2.0, 3.0, 4.0]})[""]) == "confirmed"


def test_the_recorded_table_is_that_of_the_entries():
    lines = table(read_claims(), read_rows())
    assert TABLE.read_text() == to_text(lines), "run: uv run python -m benchmarks.claims"
    assert counts(lines).partition("\n\n")[0] in (CONF.parent / "benchmarks" / "README.md").read_text()


def test_claims_have_the_papers_numbers_and_existing_rows():
    lines = list(csv.DictReader(TABLE.open()))
    place = "CIFAR-10, K = 10, R = 200, E = 1, partition.alpha=0.1"
    (largest,) = (line for line in lines if line["setting"].startswith(place) and "simclr" in line["a"])
    assert (largest["paper_a"], largest["paper_b"], largest["paper_difference"]) == ("60.29", "50.92", "9.37")
    known = {f"{suite.name}/{row.method}/{row.rule}" for suite in SUITES.values() for row in suite.rows}
    texts = [claim for claim in read_claims() if claim.numbers is None or claim.place.startswith("Figure")]
    named = {row for claim in texts for a, b, _ in claim.comparisons for row in (a, b)}
    assert named <= known
    assert len({tuple(line.values()) for line in lines}) == len(lines)


def test_rows_of_studies_have_the_selected_rates(monkeypatch):
    entry = next(iter(study.read().values()))
    results = {("tuning", 0.1): 0.5, ("tuning", 0.2): 0.4, ("alpha 0.1", 0.1): 0.6, ("alpha 0.1", 0.2): 0.7}
    entries = [
        replace(entry, study="cifar10", row="fedu", seed=0, part=part, rate=rate, results={"linear": value})
        for (part, rate), value in results.items()
    ]
    monkeypatch.setattr(study, "read", lambda: {entry.key: entry for entry in entries})
    rows = {address: row for address, row in read_rows().items() if "study" in address}
    assert rows == {"cifar10 study/alpha 0.1/fedu": {0: {"linear": 0.6}}}


def test_gains_of_the_decision_tree_are_those_of_the_benchmark():
    tree = (CONF.parent / "docs" / "choosing.md").read_text().partition("## Which strategy?")[2].partition("\n## ")[0]
    cited = re.findall(r"`([\w ]+)`(?: has)? ([+-][\d.]+) \(([+-][\d.]+) to ([+-][\d.]+)\)( for BYOL)?", tree)
    rows = read_rows()
    assert len(cited) >= 10
    for rule, *numbers, byol in cited:
        suite, result = ("digits/byol", "linear_5_per_class") if byol else ("cpu/simclr", "linear")
        differences = paired(rows, (f"{suite}/{rule}", f"{suite}/fedavg", result))
        gain = compare({rule: differences})[rule]
        assert numbers == [f"{number:+.1f}" for number in (gain.mean, gain.low, gain.high)], rule
