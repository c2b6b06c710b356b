"""FedSSL-Bench without training: order of runs, results, and the page."""

import hashlib
import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from benchmarks.fedssl_bench import partitions, results
from benchmarks.fedssl_bench.results import BenchResult, merge, page
from benchmarks.fedssl_bench.running import Job, Runner
from benchmarks.fedssl_bench.suites import ALL, RULES, SINGLE, SUITES, UNTRAINED, VARIANTS
from fedssl.config.load import compose
from fedssl.config.overrides import CONF, config_groups
from fedssl.datasets.base import ImageData
from fedssl.datasets.images import TensorImages
from fedssl.partition import make_partition

# A substitute for `fedssl`: the first argument selects its behavior, the last one its folder.
PROGRAM = """
import json, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
*words, place = sys.argv[1:]
folder = pathlib.Path(place.partition("=")[2].strip("'"))
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
with open(folder.parent / "order", "a") as file:
    print(folder.name, place.partition("=")[0], file=file)
if "slow" in words:
    (folder / "checkpoints" / "1").touch()
    time.sleep(100)
if "bad" not in words:
    summary = {"status": "finished", "reason": None, "overrides": words, "final": {"federated": {"knn": 0.5}}}
    (folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "program.py").write_text(PROGRAM)
    return sys.executable, str(tmp_path / "program.py")


@pytest.mark.heavy
def test_failed_runs_are_repeated_and_stopped_ones_resumed(tmp_path, command, capsys):
    jobs = [Job(name, tmp_path / "runs" / name, (name,), 1.0) for name in ("good", "bad", "slow")]
    runner = Runner(jobs=3, seconds=600, command=command)

    def end() -> None:
        while not (jobs[2].folder / "checkpoints" / "1").exists() or not jobs[0].finished:
            time.sleep(0.05)
        runner.end = 0.0

    threading.Thread(target=end, daemon=True).start()
    assert runner.run(jobs) == 2
    output = capsys.readouterr().out
    assert "good: finished" in output
    assert "slow: to be continued" in output
    again = [Job(job.name, job.folder, (), 1.0) for job in jobs]
    assert Runner(jobs=1, seconds=600, command=command).run(again) == 0
    order = (tmp_path / "runs" / "order").read_text().split("\n")
    assert order[-3:] == ["bad output_dir", "slow resume", ""]
    assert order.count("good output_dir") == 1


def entry(rule: str, seed: int, linear: float, method: str = "simclr") -> BenchResult:
    results = {"linear": linear, "knn": linear - 0.1}
    scores = {"linear": 0.3, "knn": 0.2}
    return BenchResult("cpu", rule, method, seed, results, scores, 2e6, "a machine", "2026-01-01", {})


def test_other_entries_of_the_file_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    merge(file, [entry("fedavg", 0, 0.4), entry("theirs", 0, 0.5)])
    together = merge(file, [entry("fedavg", 0, 0.6)])
    assert [(one.rule, one.results["linear"]) for one in together] == [("fedavg", 0.6), ("theirs", 0.5)]
    assert json.loads(file.read_text())["results"][1]["rule"] == "theirs"


def test_the_page_ranks_rows_over_common_seeds() -> None:
    numbers = {"fedavg": (0.40, 0.42, 0.44), "eua": (0.41, 0.44, 0.47), ALL: (0.6, 0.6, 0.6)}
    entries = [entry(rule, seed, one) for rule, each in numbers.items() for seed, one in enumerate(each)]
    output = page(SUITES["cpu"], entries)
    table = [line.split("|")[1:-1] for line in output.splitlines() if "|" in line]
    cells = {name.strip(): [cell.strip() for cell in each] for name, *each in table}
    assert cells["fedavg"][:3] == ["42.0 (40.0-44.0)", "32.0 (30.0-34.0)", "+12.0"]
    # Differences from FedAvg of 1, 2, 3 points, as in the test above, but a single row needs no correction.
    # The interval is 2 -+ 4.303 / sqrt(3), the effect 2 / sqrt(pi), see tests/fedssl/report/test_significance.py.
    assert cells["eua"][3:] == ["+2.0 ± 1.0", "-0.5 to +4.5", "0.07", "+1.1", "10", "1.0", "2"]
    assert cells[f"({ALL})"][8] == ""  # no rank for a bound
    assert "3 seeds detect a difference of 3.3 points with probability 0.8" in output
    fewer = page(SUITES["cpu"], [*entries, entry("krum", 0, 0.5), entry("krum", 1, 0.5)])
    assert "### `method=simclr`, seeds 0, 1\n" in fewer  # the third is not there yet
    assert "| krum | 50.0 (50.0-50.0) |" in fewer
    assert "Significantly different from `fedavg` (p < 0.05 after Holm's correction): none." in output


def test_the_readme_names_what_is_measured_and_what_is_not() -> None:
    text = (CONF.parent / "benchmarks" / "README.md").read_text()
    section = text.partition("## FedSSL-Bench\n")[2].partition("\n## ")[0]
    measured, _, missing = section.partition("Not measured: ")
    missing, _, table = missing.partition(" and all other methods")
    assert f"{len(RULES)} strategies and `local_only`" in measured
    assert set(RULES) <= set(re.findall(r"`(\w+)`", table))
    assert set(re.findall(r"`(\w+)`", missing)) == set(config_groups()["strategy"]) - {*RULES, "local_only"}
    methods = {entry.method for entry in results.read(results.RESULTS) if entry.suite == "cpu"}
    assert set(re.findall(r"`(\w+)`", measured)) >= methods - {"simclr"}


KINDS = [("fedavg", "byol"), (SINGLE, "simsiam"), (ALL, "moco_v3"), (UNTRAINED, "simclr")]


@pytest.mark.parametrize(("name", "keys"), [("cpu", KINDS[1:2]), ("gpu", [("l_dawa by loss", "simclr")])])
def test_rows_compose_and_use_the_recorded_partitions(name, keys, tmp_path) -> None:
    suite = SUITES[name]
    partitions.write_csv(map(suite.partition, suite.seeds), tmp_path)
    rows = {(row.rule, row.method): row for row in suite.rows}
    assert len(rows) == len(suite.rows)
    assert {rule for rule, method in rows if method == "simclr"} - set(VARIANTS) == {*RULES, SINGLE, ALL, UNTRAINED}
    assert {method for rule, method in rows if rule == "l_dawa"} == {method for _, method in rows}
    assert set(RULES) <= set(config_groups()["strategy"])
    image_data = ImageData(TensorImages(torch.zeros(suite.num_images, 3, 1, 1, dtype=torch.uint8)), None)
    for key in keys:
        settings = compose(suite.arguments(rows[key], 0, "/no/such", tmp_path))
        assert settings.num_clients == (suite.clients if rows[key].partitioned else 1)
        assert settings.data.limit == suite.num_images
        assert sum(map(len, make_partition(settings.partition, image_data).client_indices)) == suite.num_images
        assert set(results.PROTOCOLS) <= set(settings.evaluation.final_protocol.values["protocols"])


def test_partitions_are_the_recorded_ones(tmp_path):
    names = [suite.partition(seed) for suite in SUITES.values() if suite.recorded for seed in suite.seeds]
    partitions.write_csv(names, tmp_path)
    texts = {name: (tmp_path / f"{name}.csv").read_text() for name in names}
    for copy in ("one", "two"):
        partitions.write_parquet(texts, tmp_path / copy)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert {name: partitions.read_csv(name, tmp_path / "one") for name in names} == texts
    recorded = dict(reversed(line.split()) for line in partitions.DIGESTS.read_text().splitlines())
    assert recorded.keys() == {partitions.FILE.name, *(f"{name}.csv" for name in names)}
    assert recorded[partitions.FILE.name] == hashlib.sha256(partitions.FILE.read_bytes()).hexdigest()
