"""Load the settings, the method and the snapshots of a run, for plots of its models."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fedssl.arrays import Layers
from fedssl.base_layers import check_base, layers_digest, read_base
from fedssl.config.load import load_settings
from fedssl.config.overrides import quote_value
from fedssl.config.saved_run import BASE_FOLDER, read_overrides
from fedssl.config.settings import Settings
from fedssl.datasets.base import load_split
from fedssl.errors import InputError
from fedssl.machine.process import configure_process
from fedssl.methods.base import SSLMethod, build_method
from fedssl.model_arrays import copy_layers, exchanged_names, load_layers
from fedssl.runs.snapshots import SnapshotRound, read_snapshot_layers, snapshot_rounds
from fedssl.safe_io import corrupt_file_error
from fedssl.schedule.phases import Phase, make_phases, phase_at
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import torch_generator

# A run folder must not decide where decoded images are written, or which engine is used.
RESUME_OVERRIDES = {"dataset.cache": "dataset.cache=auto", "engine": "engine=local"}


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run with snapshots, at least one, and the device of its method."""

    folder: Path
    settings: Settings
    snapshots: list[SnapshotRound]
    device: torch.device

    @cached_property
    def method(self) -> SSLMethod:
        """Return the method as before the first round."""
        method = build_method(self.settings.model)
        like = {name: method.named_tensors[name] for name in method.base_names}
        if like:
            base = read_base(self.folder / BASE_FOLDER)
            try:
                check_base(base, like=like, digest=layers_digest(base))
            except ValueError as error:
                raise corrupt_file_error(self.folder / BASE_FOLDER, str(error)) from error
            load_layers(method, base)
        return method.to(self.device)

    @cached_property
    def phases(self) -> Sequence[Phase]:
        """Return the phases of the run's schedule."""
        encoder = self.method.encoder
        return make_phases(self.settings.model.schedule, stages=len(encoder.stage_names), frozen=encoder.frozen_stages)

    def images(self, max_images: int) -> tuple[Tensor, Tensor | None]:
        """Return the same sample of images in every call, and their labels if known.

        uint8 ``(n, channels, height, width)`` and int64 ``(n,)``, of the clients, or of the test set if the clients'
        images are on devices.
        """
        settings = self.settings
        data = load_split(settings.data, "federated") or load_split(settings.data, "test")
        if data is None:
            raise InputError(f"{self.folder}: the data set has no images here; choose another figure")
        order = torch.randperm(len(data.images), generator=torch_generator(settings.seed, "figures"))[:max_images]
        return data.images[order], None if data.labels is None else data.labels[order]

    def untrained(self) -> Layers:
        """Return the layers of the model before the first round."""
        method = build_method(self.settings.model)
        return copy_layers(method, exchanged_names(method))

    def layers(self, file: Path) -> Layers:
        """Read the layers of a snapshot; raise an `InputError` if the file is damaged."""
        return read_snapshot_layers(file, self.method.named_tensors)

    def only_model(self, snapshot: SnapshotRound, *, figure: str) -> Path:
        """Return the file of the server's model; raise an `InputError` if there are several."""
        if len(snapshot.models) > 1:
            raise InputError(
                f"{self.folder} has {len(snapshot.models)} global models, and {figure} is of one; choose another "
                "figure, or a run with one global model"
            )
        return next(iter(snapshot.models.values()))

    @contextmanager
    def loaded(self, file: Path, *, round: int) -> Iterator[SSLMethod]:
        """Yield the method with the layers of a snapshot, and with the stages that were active in its round."""
        with set_active_stages(self.method, depth=phase_at(self.phases, round).depth):
            layers = self.layers(file)
            needed = {name for name in exchanged_names(self.method) if name.startswith("encoder.")}
            if not layers.keys() >= needed:
                raise InputError(
                    f"{file} has {len(needed & layers.keys())} of the {len(needed)} layers of the encoder: the "
                    "strategy exchanges no others; choose another figure, or a run of another strategy"
                )
            load_layers(self.method, layers)
            yield self.method


def load_run_folder(folder: Path, overrides: Sequence[str]) -> LoadedRun:
    """Load a run folder with snapshots. ``overrides`` are the user's, for ``--config-dir``."""
    snapshots = snapshot_rounds(folder)
    saved = {override.partition("=")[0] for override in read_overrides(folder / "overrides.yaml") or []}
    overrides = [*overrides, *(override for key, override in RESUME_OVERRIDES.items() if key in saved)]
    settings = load_settings([*overrides, f"resume={quote_value(str(folder.resolve()))}"])
    return LoadedRun(folder, settings, snapshots, configure_process(settings.machine))
