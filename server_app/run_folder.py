"""The run folder on disk: its files, its lock, the client ids, checkpoints, and what a resumed run removes."""

import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedssl.arrays import Layers
from fedssl.atomic_files import (
    fsync_file,
    fsync_folder,
    reject_symlinks,
    remove_partial_files,
    round_file,
    saved_rounds,
    write_text,
)
from fedssl.base_layers import save_base
from fedssl.config.load import BASE_FOLDER, DEVICE_NUMBERS_FILE
from fedssl.config.saved_run import INITIAL_ENCODER_FILE
from fedssl.config.settings import RecordingSettings, Settings
from fedssl.errors import InputError
from fedssl.export import save_encoder
from fedssl.export.peft_adapter import write_adapter
from fedssl.export.preprocess import pixel_metadata
from fedssl.locks import lock
from fedssl.methods.base import SSLMethod
from fedssl.plots.partition import partition_table
from fedssl.runs.manifest import (
    JSONL_FILES,
    ClientStateParts,
    LineFile,
    Manifest,
    read_manifest,
    remove_later_versions,
    write_manifest,
)
from fedssl.runs.run import FLEET_FILE, LOCK_FILE
from fedssl.runs.snapshots import SnapshotWriter, remove_later_snapshots
from fedssl.safe_io import MAX_LINES_BYTES, corrupt_file_error, read_text, read_yaml
from fedssl.tuning import plain_copy
from fedssl.wire.records import encode_arrays, record_bytes
from server_app.build import ClientData
from server_app.checkpoint import (
    StateSchema,
    delete_checkpoints_after,
    latest_checkpoint,
    manifest_file,
    save_checkpoint,
)
from server_app.client_models import ClientModels
from server_app.client_states import ClientStates
from server_app.nodes import ClientDirectory
from server_app.updates import RoundResult
from strategies.types import ServerState, model_suffix

log = logging.getLogger("fedssl")

PERSONALIZED_FILE = "personalized.json"

# Files of a run, besides encoders, checkpoints and figures.
RUN_FILES = (
    *(LOCK_FILE, "run.log", "config.yaml", "overrides.yaml", "choices.yaml", "partition.csv"),
    *(DEVICE_NUMBERS_FILE, FLEET_FILE, INITIAL_ENCODER_FILE, "summary.json", *JSONL_FILES),
    *("representations.npz", PERSONALIZED_FILE),
)


class RunFolder:
    """The folder of one run.

    Only the server writes to it while rounds run, except for the states of clients of the same machine (``clients/``).
    The command line completes the summary of a run that could not, and ``fedssl-report`` draws the figures again.
    """

    def __init__(self, settings: RecordingSettings, *, rounds: int) -> None:
        assert settings.folder is not None
        self.folder, self.checkpoints = settings.folder, settings.folder / "checkpoints"
        self._settings, self._rounds = settings, rounds
        self._fleet: dict[str, Any] = {}  # content of `FLEET_FILE`
        self._written: dict[str, str] = {}  # content of files about edge clients
        self._client_states = ClientStateParts(self.folder)
        self._states = ClientStates(self.folder, settings.max_state_bytes)
        self._base: dict[str, Any] = {}  # digest and bytes of the base layers
        self.recoveries: list[str] = []  # damage after which the run resumed from an earlier checkpoint
        self.lines = {name: LineFile(self.folder / name) for name in JSONL_FILES}
        self._make_folder()

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            reject_symlinks(self.folder)
            if self._settings.resumed is None and (self.folder / "config.yaml").exists():
                raise InputError(
                    f"output_dir={self.folder} contains a run already; choose another folder, "
                    f"or continue that run: fedssl resume={self.folder}"
                )
            for name in ("checkpoints", "figures"):
                (self.folder / name).mkdir(exist_ok=True)
            self._check_files()
        except OSError as error:
            raise InputError(
                f"output_dir={self.folder} cannot be written ({error.strerror}); choose a folder that you may write to"
            ) from error

    def _check_files(self) -> None:
        """Refuse a folder or a broken link in place of a file; raises `InputError`."""
        paths = [self.folder / name for name in RUN_FILES]
        paths += [
            *self.folder.glob("encoder*.pt"),
            *self.folder.glob("adapter*.safetensors"),
            *self.folder.glob("checkpoints/*"),
            *self.folder.glob("figures/*"),
        ]
        for path in paths:
            if os.path.lexists(path) and not path.is_file():
                raise InputError(f"{path} must be a regular file; remove it and retry")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process; raises `InputError` if another one uses it. Ends with the process."""
        with (self.folder / LOCK_FILE).open("w") as stream:
            try:
                is_free = lock(stream.fileno())
            except OSError as error:  # a file system without locks
                raise InputError(
                    f"{self.folder} cannot be locked ({error.strerror}); set output_dir to a folder on another disk"
                ) from error
            if not is_free:
                raise InputError(f"{self.folder} is in use by another run; wait until it ends, or stop it")
            yield

    def devices(self) -> dict[str, int]:
        """Return the stored ids of edge clients by name. Empty in a new run or a simulation."""
        file = self.folder / DEVICE_NUMBERS_FILE
        client_ids = read_yaml(file, dict) or {}
        if not all(isinstance(name, str) and type(id) is int and id >= 0 for name, id in client_ids.items()):
            raise corrupt_file_error(file, "a name has no number")
        if len(set(client_ids.values())) < len(client_ids):
            raise corrupt_file_error(file, "two names have the same number")
        return client_ids

    def store_base(self, base: Layers, *, digest: str) -> None:
        """Store the base layers once; raises `InputError` if the run that is resumed has others."""
        folder = self.folder / BASE_FOLDER
        others = [file for file in folder.glob("*.safetensors") if file.stem != digest]
        if others:
            raise InputError(
                f"{others[0]} has other base layers than this run, whose source (encoder.weights) has changed since "
                "the run started; restore the source, or start a new run"
            )
        if digest:
            save_base(folder, base, digest=digest)
            self._base = {"digest": digest, "bytes": record_bytes(encode_arrays(base))}

    def register(self, clients: ClientDirectory) -> None:
        """Store edge clients: their ids by name, which a resumed run assigns again, and what they reported."""
        if not clients.client_ids:
            return
        self._write_changed(DEVICE_NUMBERS_FILE, dict(clients.client_ids))
        self._fleet["devices"] = {
            info.name: {
                "node": node,
                "images": info.num_images,
                "free disk": info.free_disk,
                "versions": dict(info.versions),
            }
            for node, info in clients.info.items()
        }
        self._fleet["rejected"] = {str(node): reason for node, reason in clients.rejected.items()}
        self._write_changed(FLEET_FILE, self._fleet)

    def register_activity(self, training: Collection[int], late: Collection[int]) -> None:
        """Store the nodes that train, and those whose reply is late."""
        self._fleet |= {"training": sorted(training), "late": sorted(late)}
        self._write_changed(FLEET_FILE, self._fleet)

    def register_quality(self, quality: Mapping[str, float]) -> None:
        """Store the mean quality of the newest delivered encoder on the images of devices."""
        self._fleet["quality"] = dict(quality)
        self._write_changed(FLEET_FILE, self._fleet)

    def _write_changed(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=2) + "\n"
        if text != self._written.get(name):
            write_text(self.folder / name, text)
            self._written[name] = text

    def write_partition(self, client_data: ClientData) -> None:
        """Write ``partition.csv``; raises `InputError` if a resumed run has another partition."""
        image_data, partition, file = client_data.image_data, client_data.partition, self.folder / "partition.csv"
        text = partition_table(
            client_data.parts, (image_data.labels, image_data.classes), (partition.groups, partition.names)
        )
        saved = read_text(file, max_bytes=MAX_LINES_BYTES) if self._settings.resumed is not None else None
        if saved is not None and saved.replace("\r\n", "\n") != text:
            raise InputError(
                f"{file} differs from the partition of this run: the data, or the file of partition=file, have changed "
                "since the run started; restore them, or start a new run"
            )
        write_text(file, text)

    def restore(self, schema: StateSchema | None = None) -> ServerState:
        """Return the state of the newest valid checkpoint, and remove everything that was written after it.

        Partial files of a killed process are removed as well. ``schema`` is as in `latest_checkpoint`.
        """
        remove_partial_files(self.folder)
        state = latest_checkpoint(self.checkpoints, schema, recoveries=self.recoveries) or ServerState()
        done = state.round
        if done > self._rounds:
            raise InputError(f"rounds={self._rounds} but the run has completed {done}; set rounds={done} or more")
        manifest = Manifest(())
        if done:
            file = manifest_file(round_file(self.checkpoints, done))
            manifest = read_manifest(file)
            self.recoveries = [*manifest.recoveries, *self.recoveries]
            # The recoveries are stored first: without the later checkpoints, another resumption would not find them.
            write_manifest(file, replace(manifest, recoveries=tuple(self.recoveries)))
        remove_later_versions(self.folder, done)
        remove_later_snapshots(self.folder, done)
        delete_checkpoints_after(self.checkpoints, done)
        for name, lines in self.lines.items():
            lines.restore(manifest.size(name), round=done)
        if schema is not None and schema.models_per_client:
            stored = ClientModels.of_checkpoint(self.folder, manifest.parts, schema.check_model)
            state = replace(state, models=stored.updated(state.models))
        return state

    def end_round(self, state: ServerState, result: RoundResult) -> tuple[ServerState, RoundResult]:
        """Evict client states beyond their limit, and write the models of single clients that have changed."""
        oldest = min(saved_rounds(self.checkpoints), default=0)
        state = self._states.evict(state, [row.client for row in result.clients], oldest_resumable=oldest)
        result = replace(result, state_bytes=self._states.total, num_evicted=self._states.num_evicted)
        if isinstance(state.models, ClientModels):
            state = replace(state, models=state.models.saved(round=state.round, oldest_resumable=oldest))
        return state, result

    def checkpoint(self, state: ServerState, *, ends: bool = False) -> None:
        """Save the state if a checkpoint is due. If the run ends, save it unless a checkpoint is as new."""
        due = state.round % self._settings.checkpoint_every == 0 or state.round == self._rounds
        if ends:
            due = state.round > max(saved_rounds(self.checkpoints), default=0)
        if due:
            for lines in self.lines.values():  # the lines of a checkpoint's rounds must be on the disk as well
                fsync_file(lines.file)
            fsync_folder(self.folder)  # and so must their names
            save_checkpoint(
                self.checkpoints,
                state,
                keep=self._settings.keep_checkpoints,
                parts=[
                    *(lines.part(state.round) for lines in self.lines.values()),
                    *self._client_states.up_to(state.round, evicted=state.evicted),
                ],
                recoveries=self.recoveries,
            )

    def encoder(self, name: str, method: SSLMethod, settings: Settings, *, rounds: int) -> Path:
        """Export the encoder of the model of this name, with LoRA merged into its weights; return the file."""
        file = self.folder / f"encoder{model_suffix(name)}.pt"
        encoder = method.encoder
        if encoder.low_rank_layers:
            adapter = f"adapter{model_suffix(name)}.safetensors"
            if encoder.server_merged_names:  # the factors are only a part of the change
                log.info("no %s: the aggregation of LoRA's products changed the weights as well", adapter)
            else:
                write_adapter(self.folder / adapter, encoder)
            encoder = plain_copy(encoder)
        save_encoder(
            file,
            encoder,
            settings=settings.model.encoder.values,
            mean=settings.data.mean,
            std=settings.data.std,
            metadata={
                "method": settings.model.method.name,
                "strategy": settings.algorithm.strategy.name,
                "dataset": settings.data.name,
                "rounds": rounds,
                "seed": settings.seed,
                **pixel_metadata(settings.data.reader.values),
            },
        )
        return file

    def snapshot_writer(self, round: int) -> SnapshotWriter | None:
        """Return a writer of this round's models; None if no snapshot is due."""
        every = self._settings.snapshot_every
        return SnapshotWriter(self.folder, round) if every and (round % every == 0 or round == self._rounds) else None
