"""Claims of the papers: outcomes by hand, and the recorded table, computed again."""

import csv
import re
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import yaml

from benchmarks import study
from benchmarks.claims import TABLE, Claim, against, counts, outcome, paired, read_claims, read_rows, table, to_text
from benchmarks.fedssl_bench.results import RESULTS, page, read
from benchmarks.fedssl_bench.suites import SUITES
from fedssl.config.overrides import CONF
from fedssl.report.paper_table import PAPERS_FOLDER
from fedssl.report.significance import compare

CLAIM = Claim("fedu", "Table 0", "A", "above", "B", "here", "linear", (60.0, 50.0), (("s/m/a", "s/m/b", "linear"),))

PAPER = yaml.safe_load((PAPERS_FOLDER / "l_dawa.yaml").read_text())


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


def test_the_readme_has_both_corrections_of_featarc():
    lines = [line for line in table(read_claims(), read_rows()) if line["row_a"] == "cpu/simclr/featarc"]
    (here,) = {line["p"] for line in lines if line["row_b"] == "cpu/simclr/fedavg"}
    (row,) = (line for line in page(SUITES["cpu"], read(RESULTS)).splitlines() if line.startswith("| featarc |"))
    text = " ".join((CONF.parent / "benchmarks" / "README.md").read_text().split())
    assert (
        f"*opposite* here (p = {here}) and do not differ significantly there (p = {row.split('|')[7].strip()})" in text
    )


def test_the_recorded_table_is_that_of_the_entries():
    lines = table(read_claims(), read_rows())
    assert TABLE.read_text() == to_text(lines), "run: uv run python -m benchmarks.claims"
    assert counts(lines).partition("\n\n")[0] in (CONF.parent / "benchmarks" / "README.md").read_text()
    outcomes = Counter(line["outcome"] for line in lines)
    number = f"{len(lines):,}"
    texts = {
        "README.md": f"Of {number} claims of the papers these small runs "
        f"[confirm {outcomes['confirmed']} and contradict {outcomes['opposite']}]",
        "CHANGELOG.md": f"the outcome of {number} claims",
        "docs/papers.md": f"the outcome of {number} claims",
        "benchmarks/README.md": f"Of the {number} claims, {len(against(lines))} are against",
    }
    for file, text in texts.items():
        assert text in (CONF.parent / file).read_text(), file
    papers = Counter(line["paper"] for line in against(lines))
    assert (
        f"below 0): {', '.join(f'{name} {number}' for name, number in papers.most_common())}."
        in (CONF.parent / "benchmarks" / "README.md").read_text()
    )


def test_columns_and_cells_become_claims_of_their_own():
    lines = list(csv.DictReader(TABLE.open()))
    first, *_ = (line for line in lines if line["a"].endswith("partition.alpha=0.6") and "barlow_twins" in line["a"])
    assert first["b"] == "method=l_dawa/barlow_twins, strategy=fedavg, partition.alpha=0.1"
    assert (first["setting"], first["paper_a"], first["paper_b"]) == (
        "CIFAR-10, K = 10, R = 200, E = 1",
        "54.82",
        "53.45",
    )
    amazon = [line for line in lines if line["setting"].startswith("Amazon, ") and line["relation"] == "above"]
    assert [(line["setting"], line["paper_difference"]) for line in amazon] == [
        ("Amazon, 100%", "0.40"),
        ("Amazon, 10%", "0.90"),
        ("Amazon, 1%", "1.80"),
    ]


def test_claims_against_the_papers_own_tables_are_found():
    lines = [line for line in against(csv.DictReader(TABLE.open())) if line["paper"] == "FedU2"]
    decorr = [line for line in lines if line["b"].endswith("regularizer=decorr")]  # "FedDecorr performs the worst"
    assert ("70.61", "74.56") in [(line["paper_a"], line["paper_b"]) for line in decorr]
    assert len(decorr) == 4
    assert {line["setting"].partition("num_clients=")[2] for line in decorr} == {"10"}


def test_gains_and_gaps_are_differences_of_the_tables():
    def numbers(name: str) -> list[list[float]]:
        return [row["numbers"] for row in PAPER["tables"][name]["rows"]]

    def minus(a: list[float], b: list[float]) -> list[float]:
        return [one - other for one, other in zip(a, b, strict=True)]

    dirichlet, single, silo, levels = map(numbers, ("table3", "table3_single_class", "table2", "table4"))
    gaps = [[abs(gap) for gap in minus(one, other)] for one, other in zip(dirichlet, single, strict=True)]
    gains = [minus(table[row + 1], table[row]) for row in (0, 2) for table in (single, dirichlet, levels)]
    silo_gain = minus(silo[4], silo[0])
    found = defaultdict(list)
    for claim in read_claims():
        if claim.paper == "l_dawa" and claim.metric.startswith(("gap", "gain")):
            found[claim.place.partition(" and")[0], claim.metric.split()[0]].append(claim.numbers)
    expected = {
        ("Table 3", "gap"): [*zip(gaps[0], gaps[1], strict=True), *zip(gaps[2], gaps[3], strict=True)],
        ("Table 3", "gain"): [*zip(gains[0] + gains[1], gains[3] + gains[4], strict=True)],
        ("Table 4", "gain"): [*zip(gains[2], gains[5], strict=True)],
        ("Table 2", "gain"): [
            (silo_gain[base + part], silo_gain[base + 3 + part]) for base in (0, 6) for part in range(3)
        ],
    }
    assert found.keys() == expected.keys()
    for key, pairs in expected.items():
        assert found[key] == [pytest.approx(pair, abs=1e-6) for pair in pairs], key


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
