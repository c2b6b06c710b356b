"""The run folder on disk: its files, its lock, what a run starts from, and what a resumed run removes."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fedssl.arrays import Layers
from fedssl.atomic_files import reject_symlinks, remove_partial_files, round_file, write_text
from fedssl.base_layers import layers_digest, save_base
from fedssl.config.load import IMAGES_FILE
from fedssl.config.saved_run import (
    BASE_FOLDER,
    DEVICE_NUMBERS_FILE,
    INITIAL_ENCODER_FILE,
    read_settings,
    resume_command,
    save_run,
)
from fedssl.config.settings import RecordingSettings
from fedssl.errors import InputError, RunError
from fedssl.locks import PROBE_SECONDS, lock
from fedssl.logs import log
from fedssl.plots.partition import partition_table
from fedssl.runs.manifest import JSONL_FILES, LineFile, Manifest, read_manifest, remove_later_versions, write_manifest
from fedssl.runs.run import FLEET_FILE, LOCK_FILE, read_run
from fedssl.runs.snapshots import remove_later_snapshots
from fedssl.runs.verify import last_checkpoint
from fedssl.safe_io import MAX_LINES_BYTES, read_text, sanitize_line
from fedssl.text_table import to_csv
from fedssl.wire.records import EXACT, record_bytes
from server_app.build import ClientData, RunComponents
from server_app.checkpoint import StateSchema, delete_checkpoints_after, latest_checkpoint, manifest_file
from server_app.client_models import ClientModels
from server_app.initial_weights import restore_teacher, store_initial_weights
from strategies.types import ServerState

PERSONALIZED_FILE = "personalized.json"

# Files of a run, besides encoders, checkpoints and figures.
RUN_FILES = (
    *(LOCK_FILE, "run.log", "config.yaml", "overrides.yaml", "choices.yaml"),
    *("partition.csv", "feature_shift.csv", IMAGES_FILE),
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
        self.path, self.checkpoints = settings.folder, settings.folder / "checkpoints"
        self._settings, self._rounds = settings, rounds
        self.base: dict[str, Any] = {}  # digest and bytes of the base layers
        self.recoveries: list[str] = []  # why results may differ from those of an uninterrupted run
        self._is_started = False
        self.lines = {name: LineFile(self.path / name) for name in JSONL_FILES}
        self._make_folder()

    def _make_folder(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            reject_symlinks(self.path)
            check_new(self._settings)
            for name in ("checkpoints", "figures"):
                (self.path / name).mkdir(exist_ok=True)
            self._check_files()
        except OSError as error:
            raise InputError(
                f"output_dir={self.path} cannot be written ({error.strerror}); choose a folder that you may write to"
            ) from error

    def _check_files(self) -> None:
        """Refuse a folder or a broken link in place of a file; raises `InputError`."""
        paths = [self.path / name for name in RUN_FILES]
        paths += [
            *self.path.glob("encoder*.pt"),
            *self.path.glob("adapter*.safetensors"),
            *self.path.glob("checkpoints/*"),
            *self.path.glob("figures/*"),
        ]
        for path in paths:
            if os.path.lexists(path) and not path.is_file():
                raise InputError(f"{path} must be a regular file; remove it and retry")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process; raises `InputError` if another one uses it. Ends with the process."""
        with (self.path / LOCK_FILE).open("w") as stream:
            try:
                is_free = lock(stream.fileno(), patience=PROBE_SECONDS)
            except OSError as error:  # a file system without locks
                raise InputError(
                    f"{self.path} cannot be locked ({error.strerror}); set output_dir to a folder on another disk"
                ) from error
            if not is_free:
                raise InputError(f"{self.path} is in use by another run; wait until it ends, or stop it")
            yield

    def check_place(self) -> None:
        """Raise `RunError` if the folder was moved or deleted during the run; clients may have made it again."""
        if self._is_started and not (self.path / "config.yaml").exists():
            raise RunError(
                f"{self.path} was moved or deleted during the run; move it back to its place, where clients may have "
                f"begun another one, then continue with {resume_command(self.path)}"
            )

    def start(self, components: RunComponents) -> ServerState:
        """Write what a run starts from, and return its first state; of a resumed run, that of the last checkpoint."""
        federation, settings = components.federation, components.settings
        self.store_base(federation.context.base)
        if settings.recording.resumed is None:
            models_per_client = federation.strategy.server.models_per_client
            state = ServerState(models=ClientModels(self.path, {}) if models_per_client else {})
        else:
            state = self.restore(schema_of(components))
            self._record_new_rounds(components, done=state.round)
            restore_teacher(components.method, state)
        if components.client_data:
            self.write_partition(components.client_data)
        store_initial_weights(settings, self.path)  # before the settings, with which the run can be resumed
        self._save_settings(settings.recording)
        return state

    def _record_new_rounds(self, components: RunComponents, *, done: int) -> None:
        """Record that the rounds ``done`` depend on another number of rounds than that of the resumed run, and warn."""
        before, now = self._settings.resumed, self._rounds
        factor = components.context.lr_factor
        follows = components.method.follows_rounds or any(factor(round) != 1 for round in range(1, now + 1))
        if done and before != now and follows:
            line = (
                f"rounds 1 to {done} were those of rounds={before}, on which the learning rate or the method depends: "
            )
            self.recoveries.append(f"{line}results differ from those of a run with rounds={now} from the start")
            log.warning(self.recoveries[-1])

    def _save_settings(self, settings: RecordingSettings) -> None:
        saved = read_settings(self.path / "config.yaml")
        if saved is not None and saved["threads"] != settings.config.threads:
            log.warning(
                "threads=%d, but the run began with %d: results differ in their last bits from those of a run without "
                "an interruption",
                settings.config.threads,
                saved["threads"],
            )
        save_run(settings, self.path)
        self._is_started = True

    def store_base(self, base: Layers) -> None:
        """Store the base layers once; raises `InputError` if the run that is resumed has others."""
        folder, digest = self.path / BASE_FOLDER, layers_digest(base)
        others = [file for file in folder.glob("*.safetensors") if file.stem != digest]
        if others:
            raise InputError(
                f"{others[0]} has other base layers than this run, whose source (encoder.weights) has changed since "
                "the run started; restore the source, or start a new run"
            )
        if digest:
            save_base(folder, base, digest=digest)
            self.base = {"digest": digest, "bytes": record_bytes(EXACT.encode(base))}

    def write_partition(self, client_data: ClientData) -> None:
        """Write ``partition.csv``; raises `InputError` if a resumed run has another partition."""
        image_data, partition, file = client_data.image_data, client_data.partition, self.path / "partition.csv"
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
        if image_data.origin is not None:
            self._check_images(image_data.origin[0].describe_files())
        if client_data.shifts:
            write_text(self.path / "feature_shift.csv", to_csv(client_data.shifts))

    def _check_images(self, found: str) -> None:
        """Write what the image files are; raises `InputError` if they have changed since the run started."""
        file = self.path / IMAGES_FILE
        saved = read_text(file) if self._settings.resumed is not None else None
        if saved is not None and saved.strip() != found:
            raise InputError(
                f"the clients' images are in {found}, and were in {sanitize_line(saved)} when the run started; restore "
                "the files, or start a new run"
            )
        write_text(file, f"{found}\n")

    def _start_state(self) -> ServerState:
        """Return the state before the first round; `InputError` if a run has lost its checkpoints."""
        lost = last_checkpoint(read_run(self.path)) if self._settings.resumed is not None else 0
        if lost:
            raise InputError(
                f"{self.checkpoints} has no checkpoint, but round {lost} of the run had one; restore it from a copy, "
                f"or start a new run (fedssl-evaluate run={shlex.quote(str(self.path))} evaluates the encoder)"
            )
        return ServerState()

    def restore(self, schema: StateSchema | None = None) -> ServerState:
        """Return the state of the newest valid checkpoint, and remove everything that was written after it.

        Partial files of a killed process are removed as well. ``schema`` is as in `latest_checkpoint`.
        """
        remove_partial_files(self.path)
        state = latest_checkpoint(self.checkpoints, schema, recoveries=self.recoveries) or self._start_state()
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
        remove_later_versions(self.path, done)
        remove_later_snapshots(self.path, done)
        delete_checkpoints_after(self.checkpoints, done)
        for name, lines in self.lines.items():
            lines.restore(manifest.size(name), round=done)
        if schema is not None and schema.models_per_client:
            stored = ClientModels.of_checkpoint(self.path, manifest.parts, schema.check_model)
            state = replace(state, models=stored.updated(state.models))
        return state


def check_new(settings: RecordingSettings) -> None:
    """Refuse to start a run in the folder of another one; raises `InputError`."""
    folder = settings.folder
    if folder is not None and settings.resumed is None and (folder / "config.yaml").exists():
        raise InputError(
            f"output_dir={folder} contains a run already; choose another folder, "
            f"or continue that run: {resume_command(folder)}"
        )


def schema_of(components: RunComponents) -> StateSchema:
    """Return the properties of the states of a run."""
    context, client_ids = components.context, components.federation.directory.client_ids
    server = components.federation.strategy.server
    return StateSchema(
        untrained=context.initial_model(),
        clients=max([components.settings.num_clients, *(number + 1 for number in client_ids.values())]),
        phases=len(context.phases),
        models_per_client=server.models_per_client,
        model_state_type=server.model_state_type,
        strategy_state_type=server.strategy_state_type,
    )
