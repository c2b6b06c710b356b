"""Parallel runs as processes within a time limit. A later call skips finished runs and resumes the others."""

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

COMMAND = (sys.executable, "-c", "from fedssl.command_line import fedssl; fedssl()")  # also where it is not installed
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 60  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Job:
    """A run. ``cost`` is its time relative to other jobs."""

    name: str
    folder: Path
    overrides: tuple[str, ...]
    cost: float

    @property
    def finished(self) -> bool:
        """Return whether the run is complete."""
        summary = read_summary(self.folder / "summary.json")
        return summary is not None and summary["status"] == "finished"


class Runner:
    """Runs at most ``jobs`` at once, until all are finished or ``seconds`` are over.

    Unfinished runs are then stopped. They keep their completed rounds and can be resumed.
    """

    def __init__(self, *, jobs: int, seconds: float, command: Sequence[str] = COMMAND) -> None:
        self.jobs, self.command = jobs, tuple(command)
        self.end = time.monotonic() + seconds
        self._over = threading.Event()

    def run(self, jobs: Iterable[Job]) -> int:
        """Run jobs in order, print the outcome of each, and return the number of unfinished jobs."""
        waiting = [job for job in jobs if not job.finished]
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                return sum(not done for done in pool.map(self._run_job, waiting))
            except KeyboardInterrupt:
                self._over.set()
                raise

    def _run_job(self, job: Job) -> bool:
        if self._ended():
            return False
        start = time.monotonic()
        log = job.folder.parent / f"{job.folder.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*self.command, *_arguments(job)],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
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
            time.sleep(_POLL_SECONDS)
        if process.poll() is None:
            process.terminate()  # handled like Ctrl-C
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _arguments(job: Job) -> list[str]:
    """Resume a run with a completed round, and start any other again."""
    if any((job.folder / "checkpoints").glob("*")):
        return [f"resume={quote_value(str(job.folder))}"]
    shutil.rmtree(job.folder, ignore_errors=True)
    return [*job.overrides, f"output_dir={quote_value(str(job.folder))}"]
