"""Metrics of a run: lines per round and client, progress, trackers, and the summary."""

import json
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np

from fedssl.atomic_files import saved_rounds, write_text
from fedssl.config.literal import shell_command
from fedssl.config.load import save_run
from fedssl.config.saved_run import read_settings
from fedssl.config.settings import RecordingSettings
from fedssl.errors import DISK_ERRORS
from fedssl.evaluation.scores import Score, format_table, mean_over_models, to_flat_dict, units_of
from fedssl.machine.memory import gigabytes
from fedssl.plots.partition import save_partition_plot
from fedssl.plots.registry import write_final_plots
from fedssl.runs.costs import sum_costs
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import START_KEYS, write_summary
from server_app.build import ClientData
from server_app.checkpoint import StateSchema
from server_app.collapse_monitor import CollapseReport, summarize_health, warn_of_collapse
from server_app.console import PlainConsole, ProgressTracker
from server_app.personalization import PersonalizedResult, mean_over_clients
from server_app.run_folder import PERSONALIZED_FILE, RunFolder
from server_app.trackers.base import SafeTracker
from server_app.updates import RoundResult
from strategies.types import ServerState

log = logging.getLogger("fedssl")

VERSIONS = ("flwr", "flwr-datasets", "hydra-core", "numpy", "torch", "torchvision")


class Recorder(RunFolder):
    """A run folder that records rounds."""

    def __init__(self, settings: RecordingSettings, *, rounds: int, screen: PlainConsole) -> None:
        super().__init__(settings, rounds=rounds)
        self._screen = screen
        self._start = time.monotonic()
        self.evaluations: list[tuple[int, dict[str, float]]] = []  # by round, those before a resume included
        self._stop_reason: str | None = None
        self._resumed_rounds = 0
        self._few_images = 0  # clients that never train
        self._personalized: dict[str, dict[str, float]] = {}
        self._progress = ProgressTracker(rounds)
        self._tracking = SafeTracker(settings)

    def start_run(self, settings: RecordingSettings, client_data: ClientData | None) -> None:
        """Write the final settings and the partition, and start the tracker. Called after all validation.

        ``settings`` replace those of the constructor: the data may have changed them.
        """
        self._settings = settings
        if client_data:
            self.write_partition(client_data)
            self._few_images = len(client_data.few_images)
        saved = read_settings(self.folder / "config.yaml")
        if saved is not None and saved["threads"] != settings.config.threads:
            log.warning(
                "threads=%d, but the run began with %d: results differ in their last bits from those of a run without "
                "an interruption",
                settings.config.threads,
                saved["threads"],
            )
        save_run(self._settings, self.folder)
        self._tracking.begin(settings, done=self._resumed_rounds)

    def restore(self, schema: StateSchema | None = None) -> ServerState:
        """Restore the folder and the progress of a resumed run, see `RunFolder.restore`."""
        state = super().restore(schema)
        self._resumed_rounds = state.round
        self._screen.set_completed(state.round)
        lines = read_jsonl(self.folder / "metrics.jsonl")
        self.evaluations = [(line["round"], line["evaluation"]) for line in lines if "evaluation" in line]
        return state

    def round(
        self,
        report: RoundResult,
        *,
        seconds: float,
        evaluation: Mapping[str, Mapping[str, Score]],
        health: CollapseReport | None,
        cost: Mapping[str, float] | None = None,
    ) -> None:
        """Write the lines of a round and log its progress line.

        ``evaluation`` has the results of every model by its name. It is empty in rounds without evaluation. ``health``
        and ``cost`` are None if they were not measured.
        """
        self._check_clients(report)
        overall = mean_over_models(list(evaluation.values())) if evaluation else {}
        rows = report.clients
        line: dict[str, Any] = {
            "round": report.round,
            "loss": _mean(row.loss for row in rows),
            "model_cosine": _mean(row.model_cosine for row in rows),
            "layer_cosine": _mean(row.layer_cosine for row in rows),
            "seconds": seconds,
            "client_seconds": _mean(row.seconds for row in rows),
            "clients": len(report.clients),
            "dropped": {str(client): reason for client, reason in report.dropped.items()},
            "bytes_up": sum(row.bytes_up for row in report.clients),
            "bytes_down": sum(row.bytes_down for row in report.clients),
        }
        if report.virtual_time is not None:
            line |= {"virtual_seconds": report.virtual_seconds, "virtual_time": report.virtual_time}
        if report.state_bytes or report.num_evicted:
            line |= {"state_bytes": report.state_bytes, "evicted_states": report.num_evicted}
        received = [row.base_bytes for row in rows if row.base_bytes]
        further = {
            "base": {"bytes": sum(received), "clients": len(received)} if received else {},
            "privacy": report.privacy,
            "secure_aggregation": report.secure_aggregation,
            "late": len(report.late),
            "cost": dict(cost or {}),
            "strategy_metrics": report.strategy_metrics,
        }
        line |= {key: value for key, value in further.items() if value}
        if overall:
            self.evaluations.append((report.round, to_flat_dict(overall)))
            line |= {"evaluation": to_flat_dict(overall), "units": units_of(overall), **_by_model(evaluation)}
        if health:
            line["health"] = summarize_health(health.rows)
            warn_of_collapse(health.rows)
            for failure in health.failures:
                log.warning(failure)
            self.lines["health.jsonl"].append([{"round": report.round, **row} for row in health.rows])
            health.representations.save(self.folder, round=report.round)
        self.lines["clients.jsonl"].append([row.line() for row in report.clients])
        self.lines["metrics.jsonl"].append([line])
        for lines in self.lines.values():
            lines.end_round(report.round)
        self._tracking.round(line)
        snapshot = self._progress.after(line, overall)
        log.info(snapshot.log_line)
        self._screen.show(snapshot)

    def _check_clients(self, report: RoundResult) -> None:
        """Raise `OSError` if clients of this machine were dropped for a full disk, so that `resume` repeats them."""
        reasons = report.dropped.values()
        codes = [code for code in DISK_ERRORS if any(os.strerror(code) in reason for reason in reasons)]
        if codes and (self.folder / "clients").is_dir():
            raise OSError(codes[0], os.strerror(codes[0]))

    def record_early_stop(self, state: ServerState, reason: str) -> None:
        """Save the state of a run that stops before its last round, and log the reason."""
        self.checkpoint(state, ends=True)
        self._stop_reason = reason
        log.info("early_stopping: %s; the run stops after round %d of %d", reason, state.round, self._rounds)

    def trained_clients(self) -> set[int]:
        return {line["client"] for line in read_jsonl(self.folder / "clients.jsonl", required=("client",))}

    def personalized(self, results: Sequence[PersonalizedResult]) -> None:
        """Write the results of personalized models, and log the means over clients."""
        if not results:
            log.warning("no client returned a personalized encoder")
            return
        averages = mean_over_clients(results)
        rows = [
            {**asdict(row), "global_test": to_flat_dict(row.global_test), "local_test": to_flat_dict(row.local_test)}
            for row in results
        ]
        self._personalized = {name: to_flat_dict(scores) for name, scores in averages.items()}
        write_text(
            self.folder / PERSONALIZED_FILE, json.dumps({"means": self._personalized, "clients": rows}, indent=1)
        )
        log.info("personalized encoders, means over clients\n%s", format_table(averages))

    def figures(self, client_data: ClientData | None) -> None:
        """Draw the partition, if it is known, and the curves of the rounds."""
        if client_data:
            image_data, partition = client_data.image_data, client_data.partition
            file = self.folder / "figures" / "partition.png"
            if partition.groups is None:
                save_partition_plot(file, client_data.parts, image_data.labels, image_data.classes)
            else:
                save_partition_plot(file, client_data.parts, partition.groups, partition.names, kind=partition.kind)
        write_final_plots(self.folder)

    def summary(
        self,
        status: str,
        *,
        reason: str | None = None,
        final: Mapping[str, Mapping[str, Score]] | None = None,
        models: Mapping[str, Mapping[str, Score]] | None = None,
    ) -> None:
        """Write ``summary.json``: status, results, versions, and the command that repeats the run.

        ``final`` has the results of every encoder in the final comparison, and ``models`` those of every model by name.
        None if the run ended before.
        """
        lines = read_jsonl(
            self.folder / "metrics.jsonl", required=("seconds", "clients", "bytes_down", "bytes_up", "dropped")
        )
        rounds = max((line["round"] for line in lines), default=0)
        if status != "finished":  # a round without a checkpoint is run again
            rounds = min(rounds, max(saved_rounds(self.folder / "checkpoints"), default=0))
            lines = [line for line in lines if line["round"] <= rounds]
        repeat = [word for word in self._settings.overrides if word.partition("=")[0] not in START_KEYS]
        results: dict[str, Any] = {}
        if final is not None:
            units = {name: unit for scores in final.values() for name, unit in units_of(scores).items()}
            results = {"final": {name: to_flat_dict(scores) for name, scores in final.items()}, "units": units}
            results |= _by_model(models or {})
        if self._personalized:
            results["personalized"] = self._personalized
        if lines and "privacy" in lines[-1]:
            results["privacy"] = lines[-1]["privacy"]
        state_bytes = lines[-1].get("state_bytes", 0) if lines else 0
        if state_bytes:
            log.info("client states have %s", gigabytes(state_bytes))
        if lines and "secure_aggregation" in lines[-1]:
            results["secure_aggregation"] = lines[-1]["secure_aggregation"]
        content = {
            "status": status,
            "reason": reason or self._stop_reason,
            "rounds": rounds,
            "seconds": round(time.monotonic() - self._start, 3),
            "overrides": repeat,
            "command": shell_command(repeat),
            **results,
            "client": asdict(sum_costs(lines)),  # of a client that takes part in every round
            "recoveries": self.recoveries,
            "base": self._base,  # base layers, which a client receives once; empty without any
            "clients_with_few_images": self._few_images,  # which never train
            "client_states": {  # on disk, without the versions of earlier rounds
                "bytes": state_bytes,
                "evicted": sum(line.get("evicted_states", 0) for line in lines),
            },
            "dropped": dict(Counter(_kind(text) for line in lines for text in line["dropped"].values())),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in VERSIONS}},
        }
        write_summary(self.folder / "summary.json", content)
        self._tracking.end(content)


def _by_model(results: Mapping[str, Mapping[str, Score]]) -> dict[str, Any]:
    """Return the results of several models by name, under ``models``. Those of a single model are known already."""
    return {"models": {name: to_flat_dict(scores) for name, scores in results.items()}} if len(results) > 1 else {}


def _kind(reason: str) -> str:
    return reason.split(":")[0]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
