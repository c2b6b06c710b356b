"""What the server writes into a run folder, from the settings to the summary, and the progress lines.

It is the only one that writes there while rounds run, but for what clients keep in ``clients/`` if they run on the same
machine. The command line completes the summary of a run that could not, and ``fedssl-report`` draws figures anew.
"""

import fcntl
import json
import logging
import os
import platform
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.atomic_files import append_text, fsync_file, reject_symlinks, remove_partial_files, saved_rounds, write_text
from fedssl.config.load import DEVICE_NUMBERS_FILE, save_run
from fedssl.config.settings import RecordingSettings, Settings
from fedssl.errors import InputError
from fedssl.evaluation.scores import Score, mean_over_models, to_flat_dict, units_of
from fedssl.export import save_encoder
from fedssl.methods.base import SSLMethod
from fedssl.plots.partition import partition_table, save_partition_plot
from fedssl.plots.registry import write_final_plots
from fedssl.report.accuracy_table import format_table
from fedssl.report.cost_table import sum_costs
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import LOCK_FILE
from fedssl.runs.snapshots import SnapshotWriter, forget_after
from fedssl.untrusted import MAX_LINES_BYTES, corrupt_file_error, read_text, read_yaml
from server_app.build import ClientData
from server_app.checkpoint import StateSchema, delete_checkpoints_after, latest_checkpoint, save_checkpoint
from server_app.collapse_monitor import CollapseReport, summarize_health, warn_of_collapse
from server_app.console import DISK_ERRORS, PlainConsole, ProgressTracker
from server_app.personalization import PersonalizedResult, mean_over_clients
from server_app.trackers.base import SafeTracker
from server_app.updates import RoundResult
from strategies.state import ServerState, model_suffix

log = logging.getLogger("fedssl")

JSONL_FILES = ("metrics.jsonl", "clients.jsonl", "health.jsonl")
PERSONALIZED_FILE = "personalized.json"

# What a run writes, beside encoders, checkpoints and figures.
RUN_FILES = (
    *(
        LOCK_FILE,
        "run.log",
        "config.yaml",
        "overrides.yaml",
        "choices.yaml",
        DEVICE_NUMBERS_FILE,
        "partition.csv",
        "summary.json",
    ),
    *JSONL_FILES,
    "representations.npz",
    PERSONALIZED_FILE,
)

VERSIONS = ("flwr", "flwr-datasets", "hydra-core", "numpy", "torch", "torchvision")


class Recorder:
    """The run folder of one run.

    Parameters
    ----------
    settings : RecordingSettings
        With a folder.
    rounds : int
        Of the run.
    screen : PlainConsole
        Shows how far the run is.

    Raises
    ------
    InputError
        The folder cannot be written, or holds another run.
    """

    def __init__(self, settings: RecordingSettings, *, rounds: int, screen: PlainConsole) -> None:
        assert settings.folder is not None
        self.folder = settings.folder
        self._settings, self._rounds, self._screen = settings, rounds, screen
        self._make_folder()
        self._start = time.monotonic()
        self.evaluations: list[tuple[int, dict[str, float]]] = []  # rounds and results, all of them
        self._stop_reason: str | None = None
        self._done = 0  # rounds of a resumed run
        self._client_ids: dict[str, int] = {}
        self._personalized: dict[str, dict[str, float]] = {}
        self._progress = ProgressTracker(rounds)
        self._tracking = SafeTracker(settings)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            reject_symlinks(self.folder)
            if self._settings.resumed is None and (self.folder / "config.yaml").exists():
                raise InputError(
                    f"output_dir={self.folder} holds a run already; choose another folder, "
                    f"or go on with that run: fedssl resume={self.folder}"
                )
            for name in ("checkpoints", "figures"):
                (self.folder / name).mkdir(exist_ok=True)
            self._check_files()
        except OSError as error:
            raise InputError(
                f"output_dir={self.folder} cannot be written ({error.strerror}); choose a folder that you may write to"
            ) from error

    def _check_files(self) -> None:
        """Refuse what is no file but has the place of one, such as a folder or a link that leads nowhere."""
        places = [self.folder / name for name in RUN_FILES]
        places += [*self.folder.glob("encoder*.pt"), *self.folder.glob("checkpoints/*"), *self.folder.glob("figures/*")]
        for place in places:
            if os.path.lexists(place) and not place.is_file():
                raise InputError(f"{place} has the place of a file of the run, but is none; remove it")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the folder for this process; another one that uses it is refused. A killed process lets go of it."""
        with (self.folder / LOCK_FILE).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(f"{self.folder} is in use by another run; wait for its end or stop it") from error
            yield

    def devices(self) -> dict[str, int]:
        """Numbers of the devices by name, as they were written before; empty if there were none.

        Raises
        ------
        InputError
            The file is damaged.
        """
        file = self.folder / DEVICE_NUMBERS_FILE
        found = read_yaml(file, dict) or {}
        numbers = list(found.values())
        if not all(isinstance(name, str) and type(number) is int and number >= 0 for name, number in found.items()):
            raise corrupt_file_error(file, "it does not give every name a number")
        if len(set(numbers)) < len(numbers):
            raise corrupt_file_error(file, "two names have the same number")
        return found

    def register(self, client_ids: Mapping[str, int]) -> None:
        """Keep the numbers of devices, by name, for when the run is resumed."""
        if client_ids != self._client_ids:
            write_text(self.folder / DEVICE_NUMBERS_FILE, json.dumps(dict(client_ids), indent=2) + "\n")
            self._client_ids = dict(client_ids)

    def start_run(self, settings: RecordingSettings, client_data: ClientData | None) -> None:
        """Make the folder that of this run: all settings have been found usable, and it is known who holds what.

        ``settings`` are those that the images have led to, in the place of those it was made with.
        """
        self._settings = settings
        if client_data:
            self._write_partition(client_data)
        save_run(self._settings, self.folder)
        self._tracking.begin(settings, done=self._done)

    def _write_partition(self, client_data: ClientData) -> None:
        image_data, partition, file = client_data.image_data, client_data.partition, self.folder / "partition.csv"
        text = partition_table(
            client_data.parts, (image_data.labels, image_data.classes), (partition.groups, partition.names)
        )
        if self._settings.resumed is not None and read_text(file, max_bytes=MAX_LINES_BYTES) not in (None, text):
            raise InputError(
                f"{file} says that clients held other images: the data, or the file of partition=file, have changed "
                "since the run began; put back what they were, or begin a new run"
            )
        write_text(file, text)

    def restore(self, schema: StateSchema | None = None) -> ServerState:
        """Read the state to go on from; what was written after it is cut off, since its rounds run again.

        What a killed process has left unfinished is removed. ``schema`` is as in `latest_checkpoint`.

        Raises
        ------
        InputError
            The run is further than ``rounds``, or no checkpoint can be used.
        """
        remove_partial_files(self.folder)
        state = latest_checkpoint(self.folder / "checkpoints", schema) or ServerState()
        done = self._done = state.round
        self._screen.set_completed(done)
        if done > self._rounds:
            raise InputError(f"rounds={self._rounds} but the run has done {done}; set rounds={done} or more")
        delete_checkpoints_after(self.folder / "checkpoints", done)
        forget_after(self.folder, done)
        for name in JSONL_FILES:
            lines = [line for line in read_jsonl(self.folder / name) if line["round"] <= done]
            write_text(self.folder / name, "".join(json.dumps(line) + "\n" for line in lines))
        rounds = read_jsonl(self.folder / "metrics.jsonl")
        self.evaluations = [(line["round"], line["evaluation"]) for line in rounds if "evaluation" in line]
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
        """Write the lines of a round and print its progress line.

        ``evaluation`` has the results of every model by its name, and nothing in rounds without one. ``health`` and
        ``cost`` are None where they were not measured.
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
        if report.privacy:
            line["privacy"] = report.privacy
        if report.late:
            line["late"] = len(report.late)
        if cost:
            line["cost"] = dict(cost)
        if report.strategy_metrics:
            line["strategy_metrics"] = report.strategy_metrics
        if overall:
            self.evaluations.append((report.round, to_flat_dict(overall)))
            line |= {"evaluation": to_flat_dict(overall), "units": units_of(overall), **_by_model(evaluation)}
        if health:
            line["health"] = summarize_health(health.rows)
            warn_of_collapse(health.rows)
            _append(self.folder / "health.jsonl", [{"round": report.round, **row} for row in health.rows])
            health.representations.save(self.folder, round=report.round)
        _append(self.folder / "clients.jsonl", [asdict(row) for row in report.clients])
        _append(self.folder / "metrics.jsonl", [line])
        self._tracking.round(line)
        snapshot = self._progress.after(line, overall)
        log.info(snapshot.log_line)
        self._screen.show(snapshot)

    def _check_clients(self, report: RoundResult) -> None:
        """End the run where clients of this machine were dropped because its disk is full: resumed, it has them all."""
        told = [code for code in DISK_ERRORS if any(os.strerror(code) in reason for reason in report.dropped.values())]
        if told and (self.folder / "clients").is_dir():
            raise OSError(told[0], os.strerror(told[0]))

    def checkpoint(self, state: ServerState, *, ends: bool = False) -> None:
        """Save the server's state if a checkpoint is due; if the run ends, whenever rounds would be lost otherwise."""
        due = state.round % self._settings.checkpoint_every == 0 or state.round == self._rounds
        if ends:
            due = state.round > max(saved_rounds(self.folder / "checkpoints"), default=0)
        if due:
            for name in JSONL_FILES:  # a checkpoint on the disk has the lines of its rounds there, too
                fsync_file(self.folder / name)
            save_checkpoint(self.folder / "checkpoints", state, keep=self._settings.keep_checkpoints)

    def record_early_stop(self, state: ServerState, reason: str) -> None:
        """Keep the state with which the run ends before its last round, and tell why."""
        self.checkpoint(state, ends=True)
        self._stop_reason = reason
        log.info("early_stopping: %s; the run ends after round %d of %d", reason, state.round, self._rounds)

    def snapshot_writer(self, round: int) -> SnapshotWriter | None:
        """What keeps the models of this round; None: they are not to be kept."""
        every = self._settings.snapshot_every
        return SnapshotWriter(self.folder, round) if every and (round % every == 0 or round == self._rounds) else None

    def encoder(self, name: str, method: SSLMethod, settings: Settings, *, rounds: int) -> None:
        """Write the encoder of the model of this name after so many rounds, for use elsewhere."""
        save_encoder(
            self.folder / f"encoder{model_suffix(name)}.pt",
            method.encoder,
            settings=settings.model.encoder.values,
            mean=settings.data.mean,
            std=settings.data.std,
            metadata={
                "method": settings.model.method.name,
                "strategy": settings.algorithm.strategy.name,
                "dataset": settings.data.name,
                "rounds": rounds,
                "seed": settings.seed,
            },
        )

    def trained_clients(self) -> set[int]:
        """The clients of which an update was used, ever."""
        return {line["client"] for line in read_jsonl(self.folder / "clients.jsonl", required=("client",))}

    def personalized(self, found: Sequence[PersonalizedResult]) -> None:
        """Write what clients' own models are worth, and show the means over clients."""
        if not found:
            log.warning("no client showed the encoder that it would use")
            return
        averages = mean_over_clients(found)
        rows = [
            {**asdict(one), "global_test": to_flat_dict(one.global_test), "local_test": to_flat_dict(one.local_test)}
            for one in found
        ]
        self._personalized = {name: to_flat_dict(scores) for name, scores in averages.items()}
        write_text(
            self.folder / PERSONALIZED_FILE, json.dumps({"means": self._personalized, "clients": rows}, indent=1)
        )
        log.info("what clients would use themselves, means over clients\n%s", format_table(averages))

    def figures(self, client_data: ClientData | None) -> None:
        """Draw who holds what, if that is known, and the curves of the rounds."""
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
        """Write ``summary.json``: how the run ended, its results, versions, and the command that repeats it.

        ``final`` has the results of every encoder in the final comparison, and ``models`` those of every model by its
        name; None: it has not come to that.
        """
        lines = read_jsonl(
            self.folder / "metrics.jsonl", required=("seconds", "clients", "bytes_down", "bytes_up", "dropped")
        )
        rounds = max((line["round"] for line in lines), default=0)
        if status != "finished":  # a round without a checkpoint is run again
            rounds = min(rounds, max(saved_rounds(self.folder / "checkpoints"), default=0))
            lines = [line for line in lines if line["round"] <= rounds]
        repeat = [word for word in self._settings.overrides if word.partition("=")[0] not in ("output_dir", "resume")]
        results: dict[str, Any] = {}
        if final is not None:
            units = {name: unit for scores in final.values() for name, unit in units_of(scores).items()}
            results = {"final": {name: to_flat_dict(scores) for name, scores in final.items()}, "units": units}
            results |= _by_model(models or {})
        if self._personalized:
            results["personalized"] = self._personalized
        if lines and "privacy" in lines[-1]:
            results["privacy"] = lines[-1]["privacy"]
        content = {
            "status": status,
            "reason": reason or self._stop_reason,
            "rounds": rounds,
            "seconds": round(time.monotonic() - self._start, 3),
            "overrides": repeat,
            "command": shlex.join(["fedssl", *repeat]),
            **results,
            "client": asdict(sum_costs(lines)),  # one that took part in every round
            "dropped": dict(Counter(_kind(text) for line in lines for text in line["dropped"].values())),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in VERSIONS}},
        }
        write_text(self.folder / "summary.json", json.dumps(content, indent=2) + "\n")
        self._tracking.end(content)


def _by_model(results: Mapping[str, Mapping[str, Score]]) -> dict[str, Any]:
    """Results of every model by its name, under ``models``; of one alone they are told already."""
    return {"models": {name: to_flat_dict(scores) for name, scores in results.items()}} if len(results) > 1 else {}


def _kind(reason: str) -> str:
    """Reduce a reason to what can be counted, without its particulars."""
    return reason.split(":")[0]


def _mean(values: Iterable[float | None]) -> float | None:
    """Average over the clients that have a value; None if none has, e.g. a cosine where no weights travel."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _append(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    append_text(file, "".join(json.dumps(line) + "\n" for line in lines))
