"""Complete verification of a run folder: settings, lines, checkpoints, client states, encoders, summary."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedssl.atomic_files import round_file, saved_rounds
from fedssl.errors import InputError
from fedssl.runs.manifest import MANIFEST_SUFFIX, read_manifest
from fedssl.runs.run import RUN_MARKERS, read_run


@dataclass(frozen=True)
class Verification:
    """The result: one sentence for everything that is wrong, and the rounds whose checkpoints are intact."""

    problems: tuple[str, ...]
    intact: tuple[int, ...]

    @property
    def recovery(self) -> str:
        """Return what a resumed run can start from."""
        if not self.intact:
            return "no checkpoint is intact: the run cannot be resumed"
        return f"resume continues after round {self.intact[-1]}"


def verify_run(folder: Path) -> Verification:
    """Verify every file of a run folder that a command reads; `InputError` if it is no run folder.

    All files are read completely: digests of the checkpoints, of the client states and of the lines that belong to
    them, the lines of every round and client, and the weights of the encoders.
    """
    if not any((folder / name).exists() for name in RUN_MARKERS):
        raise InputError(f"{folder} is not a run folder; `fedssl-runs list` shows all runs")
    try:
        problems = _settings_problems(folder)
    except InputError as error:
        problems = [str(error)]
    problems += _encoder_problems(folder)
    checkpoints = {round: list(_checkpoint_problems(folder, round)) for round in saved_rounds(folder / "checkpoints")}
    for round, found in checkpoints.items():
        problems += [f"checkpoint of round {round}: {problem}" for problem in found]
    return Verification(tuple(problems), tuple(round for round, found in checkpoints.items() if not found))


def _settings_problems(folder: Path) -> list[str]:
    run = read_run(folder)
    problems = [] if run.settings else ["config.yaml is missing or empty"]
    if run.summary is None and not run.running:
        problems.append("summary.json is missing or damaged")
    if run.finished and not list(folder.glob("encoder*.pt")):
        problems.append("encoder.pt is missing")
    return problems + [problem.removeprefix(f"{folder}/") for problem in run.incomplete_files]


def _checkpoint_problems(folder: Path, round: int) -> Iterator[str]:
    try:
        manifest = read_manifest(round_file(folder / "checkpoints", round, MANIFEST_SUFFIX))
    except (ValueError, InputError) as error:
        yield str(error)
    else:
        yield from manifest.problems(folder)


def _encoder_problems(folder: Path) -> Iterator[str]:
    from fedssl.export import load_encoder  # imports torch

    for file in sorted(folder.glob("encoder*.pt")):
        try:
            load_encoder(file)
        except InputError as error:
            yield str(error)
