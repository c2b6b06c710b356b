"""Complete verification of a run folder: settings, lines, checkpoints, client states, encoders, snapshots, summary."""

import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedssl.atomic_files import round_file, saved_rounds
from fedssl.config.saved_run import BASE_FOLDER, INITIAL_ENCODER_FILE, read_overrides
from fedssl.errors import InputError
from fedssl.runs.manifest import MANIFEST_SUFFIX, read_manifest
from fedssl.runs.run import RUN_MARKERS, Run, read_run


@dataclass(frozen=True)
class Verification:
    """The result: one sentence for everything that is wrong, and the rounds whose checkpoints are intact."""

    problems: tuple[str, ...]
    intact: tuple[int, ...]
    has_settings: bool = True  # whether the settings can be read
    has_begun: bool = True  # whether the run has a checkpoint, or has had one

    @property
    def recovery(self) -> str:
        """Return what a resumed run can start from."""
        if not self.has_settings:
            return "without its settings the run cannot be resumed"
        if not self.has_begun:
            return "resume starts with round 1"
        if not self.intact:
            return "no checkpoint is intact: the run cannot be resumed"
        return f"resume continues after round {self.intact[-1]}"


def verify_run(folder: Path) -> Verification:
    """Verify every file of a run folder that a command reads; `InputError` if it is no run folder.

    All files are read completely: digests of the checkpoints, of the client states and of the lines that belong to
    them, the lines of every round and client, the weights of the encoders, snapshots and representations.
    """
    if not any((folder / name).exists() for name in RUN_MARKERS):
        raise InputError(f"{folder} is not a run folder; `fedssl-runs list` shows all runs")
    unreadable, run = [*_override_problems(folder)], None
    problems = [*unreadable]
    try:
        run = read_run(folder)
        problems += _run_problems(run)
    except InputError as error:
        problems.append(str(error))
    has_settings = not unreadable and run is not None and bool(run.settings)
    problems += [*_base_problems(folder), *_encoder_problems(folder), *_archive_problems(folder)]
    checkpoints = {round: list(_checkpoint_problems(folder, round)) for round in saved_rounds(folder / "checkpoints")}
    for round, found in checkpoints.items():
        problems += [f"checkpoint of round {round}: {problem}" for problem in found]
    intact = tuple(round for round, found in checkpoints.items() if not found)
    has_begun = bool(checkpoints) or run is None or last_checkpoint(run) > 0
    return Verification(tuple(problems), intact, has_settings, has_begun)


def _override_problems(folder: Path) -> Iterator[str]:
    try:
        if read_overrides(folder / "overrides.yaml") is None:  # those of the summary are the same
            yield "overrides.yaml is missing"
    except InputError as error:
        yield str(error)


def _run_problems(run: Run) -> Iterator[str]:
    folder, incomplete = run.folder, run.incomplete_files
    if not run.settings:
        yield "config.yaml is missing or empty"
    if run.summary is None and not run.running:
        yield "summary.json is missing or damaged"
    if run.finished and not list(folder.glob("encoder*.pt")):
        yield "encoder.pt is missing"
    if run.value("encoder.weights") not in ("", "null") and not (folder / INITIAL_ENCODER_FILE).exists():
        yield f"{INITIAL_ENCODER_FILE} is missing, without which the run cannot be resumed"
    if not run.running and max(saved_rounds(folder / "checkpoints"), default=0) < last_checkpoint(run):
        yield f"the checkpoint of round {last_checkpoint(run)} is missing"
    for problem in incomplete:
        yield problem.removeprefix(f"{folder}/")


def last_checkpoint(run: Run) -> int:
    """Return the round of a run's last checkpoint; 0 for none. A killed run may lack that of its last round."""
    every = run.value("checkpoint_every")
    if run.finished or not every.isdecimal() or every == "0":
        return run.rounds_done
    return (run.rounds_done - 1) // int(every) * int(every) if run.rounds_done else 0


def _checkpoint_problems(folder: Path, round: int) -> Iterator[str]:
    try:
        manifest = read_manifest(round_file(folder / "checkpoints", round, MANIFEST_SUFFIX))
    except (ValueError, InputError) as error:
        yield str(error)
    else:
        yield from manifest.problems(folder)


def _base_problems(folder: Path) -> Iterator[str]:
    """Yield the files of base layers that do not have the layers of their digest, and a file that is missing."""
    from fedssl.base_layers import stored_digests  # imports NumPy

    base = folder / BASE_FOLDER
    expected = {file.stem for file in base.glob("*.safetensors")}
    with suppress(InputError):  # which `verify_run` reports
        summary = read_run(folder).summary or {}
        expected |= {str(digest) for key, digest in summary.get("base", {}).items() if key == "digest"}
    for digest in sorted(expected - set(stored_digests([base]))):
        yield f"{BASE_FOLDER}/{digest}.safetensors is missing or damaged"


def _encoder_problems(folder: Path) -> Iterator[str]:
    """Yield the encoders that cannot be loaded. One of the user's own package is only read, without its code."""
    from fedssl.export import load_encoder, saved_target  # import torch

    for file in sorted(folder.glob("encoder*.pt")):
        try:
            if saved_target(file).startswith("fedssl."):  # all checksums are compared
                load_encoder(file)
        except InputError as error:
            yield str(error)


def _archive_problems(folder: Path) -> Iterator[str]:
    """Yield the initial encoder, snapshots and representations whose CRC-32 is wrong. No content is loaded."""
    patterns = (INITIAL_ENCODER_FILE, "models/*/*.pt", "representations.npz")
    for file in sorted(file for pattern in patterns for file in folder.glob(pattern)):
        try:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip() is not None
        except Exception:  # a damaged header can raise anything
            damaged = True
        if damaged:
            yield f"{file.relative_to(folder)} is damaged"
