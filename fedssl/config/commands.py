"""Commands with settings such as ``run=DIR``, and the file of the encoder that these name."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedssl.command_line import run_command
from fedssl.config.targets import expand_config_dir_flag
from fedssl.errors import InputError
from fedssl.safe_io import sanitize


def run_with_overrides(name: str, usage: str, run: Callable[[Sequence[str]], str]) -> int:
    """Run a command with overrides and print its text, or the usage; return the exit status, see `run_command`."""
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(usage)
        return 0 if sys.argv[1:] else 2
    return run_command(name, lambda: print(sanitize(run(expand_config_dir_flag(sys.argv[1:])), lines=True)))


def encoder_file(source: Mapping[str, str]) -> Path:
    """Return the encoder file of ``run=DIR`` or ``encoder=FILE``; `InputError` if it does not exist."""
    if len(source) != 1:
        raise InputError("give either run=DIR, the folder of a finished run, or encoder=FILE, its encoder.pt")
    file = Path(source["run"], "encoder.pt") if "run" in source else Path(source["encoder"])
    if not file.is_file():
        advice = "give the folder of a finished run"
        if "run" in source and Path(source["run"], "config.yaml").is_file():
            advice = f"finish the run with fedssl resume={source['run']}"
        several = sorted(file.parent.glob("encoder-*.pt"))
        if several:  # the run has several models
            advice = f"the run has {len(several)} encoders; give one of them: encoder={several[0]}"
        raise InputError(f"{file} does not exist; {advice}")
    return file
