"""The summary of a run, ``summary.json``."""

import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from math import inf
from typing import Any

from fedssl.atomic_files import saved_rounds
from fedssl.config.literal import shell_command
from fedssl.config.saved_run import resume_command
from fedssl.config.settings import Settings
from fedssl.errors import InputError
from fedssl.evaluation.scores import format_table, num_test_images, to_flat_dict, units_of
from fedssl.logs import log
from fedssl.machine.memory import gigabytes
from fedssl.runs.costs import sum_costs
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import START_KEYS, write_summary
from fedssl.wire.device import installed_version
from server_app.callbacks.base import Callback, RunEnd
from server_app.callbacks.evaluation import results_by_model
from server_app.client_states import summarize_states
from server_app.evaluator import missing_evaluations
from server_app.exchanges import secure
from server_app.run_folder import RunFolder
from server_app.trackers.base import SafeTracker
from strategies.mods import privacy

VERSIONS = ("flwr", "flwr-datasets", "hydra-core", "numpy", "torch", "torchvision")


class Summary(Callback):
    """Writes the summary, ends the tracker, and logs where the results are.

    ``few_images`` is the number of clients that never train for lack of images, and ``started`` the time of the start.
    """

    def __init__(
        self, folder: RunFolder, settings: Settings, tracker: SafeTracker, *, few_images: int, started: float
    ) -> None:
        self._folder, self._settings, self._tracker = folder, settings, tracker
        self._few_images, self._started = few_images, started
        self._first_round: int | None = None  # that this process has begun

    def on_round_start(self, round: int) -> None:
        """Remove the summary of an earlier end, which does not describe the run any more, also if this process dies."""
        if self._first_round is None:
            (self._folder.path / "summary.json").unlink(missing_ok=True)
            self._first_round = round

    def on_run_end(self, end: RunEnd) -> None:
        """Write the summary, unless settings of a resumption were refused: then the run is unchanged."""
        resumed = self._settings.recording.resumed is not None
        if isinstance(end.error, InputError) and resumed and self._first_round is None:
            return
        with suppress(OSError) if end.error is not None else nullcontext():  # the disk may be full
            content = self._content(end)
            write_summary(self._folder.path / "summary.json", content)
            self._tracker.end(content)
        if end.status == "paused":
            log.info(
                "paused after round %d; continue with: %s",
                *(self._settings.pause_after, resume_command(self._folder.path)),
            )
        elif end.status == "finished":
            missing = missing_evaluations(self._settings).get("final_evaluation")
            table = f"nothing was evaluated: {missing}" if missing and not end.final else format_table(end.final or {})
            log.info("%s\nresults are in %s", table, self._folder.path)

    def _reason(self, end: RunEnd) -> str | None:
        if end.status == "paused":
            return f"paused after round {self._settings.pause_after} of {self._settings.rounds}"
        if end.error is None:
            return end.reason
        if end.status == "interrupted":  # Flower's process exits when the SuperLink stops the run
            return "stopped by the " + ("user" if isinstance(end.error, KeyboardInterrupt) else "SuperLink")
        return str(end.error) or type(end.error).__name__

    def _content(self, end: RunEnd) -> dict[str, Any]:
        folder, overrides = self._folder, self._settings.recording.overrides
        lines = read_jsonl(
            folder.path / "metrics.jsonl", required=("seconds", "clients", "bytes_down", "bytes_up", "dropped")
        )
        rounds = max((line["round"] for line in lines), default=0)
        if end.status != "finished":  # a round without a checkpoint is run again
            rounds = min(rounds, max(saved_rounds(folder.checkpoints), default=0))
            lines = [line for line in lines if line["round"] <= rounds]
        before = [line["seconds"] for line in lines if line["round"] < (self._first_round or inf)]  # by earlier starts
        repeat = [word for word in overrides if word.partition("=")[0] not in START_KEYS]
        states = summarize_states(lines)
        if states["bytes"]:
            log.info("client states have %s", gigabytes(states["bytes"]))
        return {
            "status": end.status,
            "reason": self._reason(end),
            "rounds": rounds,
            "seconds": round(sum(before) + time.monotonic() - self._started, 3),
            "overrides": repeat,
            "command": shell_command(repeat),
            **_results(end, lines),
            "client": asdict(sum_costs(lines)),  # of a client that takes part in every round
            "recoveries": folder.recoveries,
            "base": folder.base,  # base layers, which a client receives once; empty without any
            "clients_with_few_images": self._few_images,  # which never train
            "client_states": states,
            "dropped": dict(Counter(text.split(":")[0] for line in lines for text in line["dropped"].values())),
            "versions": {
                "python": platform.python_version(),
                **{name: found for name in VERSIONS if (found := installed_version(name))},
            },
        }


def _results(end: RunEnd, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if end.final is not None:
        units = {name: unit for scores in end.final.values() for name, unit in units_of(scores).items()}
        results = {"final": {name: to_flat_dict(scores) for name, scores in end.final.items()}, "units": units}
        results["test_images"] = num_test_images(end.final.values())
        results |= results_by_model(end.models)
    if end.personalized:
        results["personalized"] = end.personalized
    last = lines[-1] if lines else {}
    return results | {key: last[key] for key in (privacy.GUARANTEE, secure.GUARANTEE) if key in last}
