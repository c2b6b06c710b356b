"""Mutation check: apply one fault at a time to a copy of the repository and run the tests that should fail.

    uv run python -m tests.mutations.run [--package fedssl/methods] [--jobs 2] [--output results.json]
    uv run python -m tests.mutations.run --list    # only check that every mutation is applicable
    uv run python -m tests.mutations.run --file tests/faults/planted.toml    # bugs that fault schedules find

`mutations.toml` lists the faults: the text `before` occurs once in `file`, is replaced by `after`, and one of `tests`
must fail. Heavy tests run too. All take one to two hours on two cores. The exit status is 1 if a mutation survived.
"""

import argparse
import compileall
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests/mutations/mutations.toml"
PACKAGES = ("fedssl", "strategies", "client_app", "server_app", "simulation")
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider")
OUTCOMES = {0: "survived", 1: "killed"}  # by pytest's exit status; others are errors, e.g. of collection


@dataclass(frozen=True)
class Mutation:
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    @property
    def package(self) -> str:
        return "/".join(Path(self.file).parent.parts[:2])


def read_mutations(file: Path = FILE) -> list[Mutation]:
    tables = tomllib.loads(file.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**{**table, "tests": tuple(table["tests"])}) for table in tables]


def problems(mutations: Sequence[Mutation]) -> list[str]:
    """Return a sentence for each mutation that cannot be applied."""
    found = []
    for mutation in mutations:
        path = ROOT / mutation.file
        count = path.read_text(encoding="utf-8").count(mutation.before) if path.is_file() else 0
        if count != 1:
            found.append(f"{mutation.file}: {mutation.before!r} occurs {count} times instead of once")
        found += [f"{mutation.file}: {test} does not exist" for test in mutation.tests if not (ROOT / test).is_file()]
    return found


def copy_repository(target: Path) -> None:
    """Copy the working tree and compile it, so that only a mutated file is compiled again."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for package in PACKAGES:
        compileall.compile_dir(target / package, quiet=2)
    imported = f"import {', '.join(PACKAGES)}; print({', '.join(f'{package}.__file__' for package in PACKAGES)})"
    paths = subprocess.check_output([sys.executable, "-c", imported], cwd=target, env=_environment(target), text=True)
    if not all(Path(path).is_relative_to(target) for path in paths.split()):
        raise SystemExit(f"the packages are imported from {paths.strip()} instead of {target}")


def _environment(copy: Path) -> dict[str, str]:
    # No bytecode of a mutated file is saved, so that it is never used for the restored one.
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def run_tests(copy: Path, arguments: Sequence[str], *, timeout: float) -> tuple[str, str]:
    """Return the outcome of pytest with these arguments in a copy, and the end of its output."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command, environment = [*PYTEST, *arguments], _environment(copy)
    process = subprocess.Popen(command, cwd=copy, env=environment, start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # and the processes that the tests have started
        return "timeout", process.communicate()[0][-2000:]
    return OUTCOMES.get(process.returncode, "error"), output[-2000:]


def apply_and_test(mutation: Mutation, copy: Path, *, timeout: float, flags: Sequence[str]) -> dict[str, Any]:
    path, start = copy / mutation.file, time.monotonic()
    original, status = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(original.replace(mutation.before, mutation.after), encoding="utf-8")
    try:
        outcome, output = run_tests(copy, [*flags, *mutation.tests], timeout=timeout)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    seconds = round(time.monotonic() - start, 1)
    print(f"{outcome:9}{seconds:6} s  {mutation.file}: {mutation.before!r}", flush=True)
    return {**asdict(mutation), "outcome": outcome, "seconds": seconds, "output": output}


def run_all(mutations: Sequence[Mutation], *, jobs: int, timeout: float, flags: Sequence[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies = [Path(folder).resolve() / str(number) for number in range(jobs)]
        for copy in copies:
            copy_repository(copy)
        tests = dict.fromkeys(test for mutation in mutations for test in mutation.tests)
        outcome, output = run_tests(copies[0], [*flags, *tests], timeout=len(tests) * timeout)
        if outcome != "survived":
            raise SystemExit(f"without a fault the tests do not pass ({outcome}):\n{output}")

        def run_share(copy: Path, share: Sequence[Mutation]) -> list[dict[str, Any]]:
            return [apply_and_test(mutation, copy, timeout=timeout, flags=flags) for mutation in share]

        shares = [mutations[number::jobs] for number in range(jobs)]
        return [result for results in pool.map(run_share, copies, shares) for result in results]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="check that every mutation is applicable; run no test")
    parser.add_argument("--package", help="only the mutations of this folder, e.g. strategies or fedssl/methods")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120, help="seconds of each mutation")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    parser.add_argument("--file", type=Path, default=FILE, help="other mutations than those of mutations.toml")
    options = parser.parse_args()
    mutations = [m for m in read_mutations(options.file) if options.package in (None, m.package)]
    found = problems(mutations)
    print(*found, f"{len(mutations)} mutations, {len(found)} problems", sep="\n")
    if options.list or found:
        return int(bool(found))
    flags = ["--heavy"]
    results = run_all(mutations, jobs=options.jobs, timeout=options.timeout, flags=flags)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(
        ", ".join(f"{count} {outcome}" for outcome, count in Counter(result["outcome"] for result in results).items())
    )
    return int(any(result["outcome"] != "killed" for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
