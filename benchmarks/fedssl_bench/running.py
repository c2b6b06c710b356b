"""Runs as processes beside each other, within a time: those that are finished stay, those that are not go on."""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fedssl.config.overrides import quote_value
from fedssl.runs.run import read_summary

COMMAND = (str(Path(sys.executable).with_name("fedssl")),)
_STEP = 0.2  # seconds between two looks at a process
_GRACE = 60  # seconds for a run that is asked to end


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes
    ----------
    name : str
    folder : Path
    words : tuple of str
        Of the command line.
    cost : float
        Its time in any unit, beside that of other jobs.
    """

    name: str
    folder: Path
    overrides: tuple[str, ...]
    cost: float

    @property
    def finished(self) -> bool:
        """Whether it ran to its end."""
        summary = read_summary(self.folder / "summary.json")
        return summary is not None and summary["status"] == "finished"


class Runner:
    """Runs jobs until all are finished or the time is over.

    Parameters
    ----------
    beside : int
        How many run at a time.
    seconds : float
        After these, running jobs are asked to end; they keep their finished rounds and go on the next time.
    command : sequence of str
        What is started with a job's words.
    """

    def __init__(self, *, beside: int, seconds: float, command: Sequence[str] = COMMAND) -> None:
        self.beside, self.command = beside, tuple(command)
        self.end = time.monotonic() + seconds
        self._over = threading.Event()

    def run(self, jobs: Iterable[Job]) -> int:
        """Run them in their order and tell of each; returns how many are not finished."""
        waiting = [job for job in jobs if not job.finished]
        with ThreadPoolExecutor(self.beside) as pool:
            try:
                return sum(not done for done in pool.map(self._one, waiting))
            except KeyboardInterrupt:
                self._over.set()
                raise

    def _one(self, job: Job) -> bool:
        if self._over.is_set() or time.monotonic() >= self.end:
            return False
        start = time.monotonic()
        log = job.folder.parent / f"{job.folder.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*self.command, *_words(job)], stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._wait(process)
        minutes = (time.monotonic() - start) / 60
        ending = "finished" if job.finished else "to be continued" if self._ended() else f"failed, see {log}"
        print(f"{job.name}: {ending} after {minutes:.1f} min", flush=True)
        return job.finished

    def _ended(self) -> bool:
        return self._over.is_set() or time.monotonic() >= self.end

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not self._ended():
            time.sleep(_STEP)
        if process.poll() is None:
            process.terminate()  # which a run takes as Ctrl-C, also where that is ignored
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _words(job: Job) -> list[str]:
    """A run that has a finished round goes on; one without begins anew."""
    if any((job.folder / "checkpoints").glob("*")):
        return [f"resume={quote_value(str(job.folder))}"]
    shutil.rmtree(job.folder, ignore_errors=True)
    return [*job.overrides, f"output_dir={quote_value(str(job.folder))}"]
