"""Start time of commands that train nothing, relative to an empty Hydra app.

    uv run python benchmarks/start.py

Runs every command as a process, in turn, and prints medians, with minima in parentheses. Target: at most 0.3 s more
than the empty app, which only composes an empty config.
"""

import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.common import make_parser, time_in_turn

BASE, TARGET = "empty Hydra app", 0.3  # seconds
EMPTY_APP = """
import hydra
@hydra.main(version_base="1.3", config_path=None)
def main(config):
    pass
main()
"""
COMMANDS = {
    "fedssl --help": ["fedssl", "--help"],
    "fedssl --cfg job": ["fedssl", "--cfg", "job"],
    "misspelled choice": ["fedssl", "strategy=fedav"],
    "fedssl-runs": ["fedssl-runs", "list"],
    "fedssl-report": ["fedssl-report", "."],
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    programs = Path(sys.executable).parent
    commands = {name: [str(programs / command[0]), *command[1:]] for name, command in COMMANDS.items()}
    commands = {BASE: [sys.executable, "-c", EMPTY_APP, "hydra.run.dir=."], **commands}
    with tempfile.TemporaryDirectory() as folder:
        run = partial(subprocess.run, cwd=folder, capture_output=True)
        seconds = time_in_turn({name: partial(run, command) for name, command in commands.items()}, turns=turns)
    base = statistics.median(seconds[BASE])
    for name, values in seconds.items():
        above = statistics.median(values) - base
        missed = "*" if above > TARGET else ""
        print(f"{name:20}{statistics.median(values):6.2f} s ({min(values):.2f})   {above:+.2f} s{missed}")


if __name__ == "__main__":
    main()
