"""A run folder opened again to look into its models: the settings, the method, and the models that it keeps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fedssl.arrays import Layers
from fedssl.config.load import load_settings
from fedssl.config.overrides import quote_value
from fedssl.config.saved_run import read_overrides
from fedssl.config.settings import Settings
from fedssl.datasets.base import load_split
from fedssl.errors import InputError
from fedssl.machine.process import configure_process
from fedssl.methods.base import SSLMethod, build_method
from fedssl.model_arrays import copy_layers, exchanged_names, load_layers
from fedssl.runs.snapshots import KeptRound, kept_rounds, read_layers
from fedssl.schedule.phases import Phase, make_phases, phase_at
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import torch_generator

# What a run folder may not choose for whoever looks into it: where decoded images are written, and an engine.
RESUME_OVERRIDES = {"dataset.cache": "dataset.cache=auto", "engine": "engine=local"}


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run whose models are looked into.

    Attributes
    ----------
    folder : Path
    settings : Settings
    kept : list of KeptRound
        At least one.
    device : torch.device
        Where its method is.
    """

    folder: Path
    settings: Settings
    kept: list[KeptRound]
    device: torch.device

    @cached_property
    def method(self) -> SSLMethod:
        """The method, as it is before the first round."""
        return build_method(self.settings.model).to(self.device)

    @cached_property
    def phases(self) -> Sequence[Phase]:
        """Those of the run's schedule."""
        return make_phases(self.settings.model.schedule, stages=len(self.method.encoder.stage_names))

    def images(self, max_images: int) -> tuple[Tensor, Tensor | None]:
        """Some images of the clients, or of the test where those are on devices, and their labels if they have any.

        uint8 ``(n, channels, height, width)``, and int64 ``(n,)``; always the same ones.
        """
        data = self.settings.data
        found = load_split(data, "federated") or load_split(data, "test")
        if found is None:
            raise InputError(f"{self.folder}: the data set has no images here; choose another figure")
        order = torch.randperm(len(found.images), generator=torch_generator(self.settings.seed, "figures"))[:max_images]
        return found.images[order], None if found.labels is None else found.labels[order]

    def untrained(self) -> Layers:
        """Layers of the model before the first round."""
        method = build_method(self.settings.model)
        return copy_layers(method, exchanged_names(method))

    def layers(self, file: Path) -> Layers:
        """Layers of one of the models that are kept; raises `InputError` if the file is damaged."""
        return read_layers(file, self.method.named_tensors)

    def only_model(self, kept: KeptRound, *, figure: str) -> Path:
        """The server's model after a round; raises `InputError` if there are several."""
        if len(kept.models) > 1:
            raise InputError(
                f"{self.folder} has {len(kept.models)} global models, and {figure} is of one; choose another figure, "
                "or a run with one global model"
            )
        return next(iter(kept.models.values()))

    @contextmanager
    def loaded(self, file: Path, *, round: int) -> Iterator[SSLMethod]:
        """The method with one of the models in it, with the stages of the encoder that ran in its round.

        Raises
        ------
        InputError
            The file is damaged, or lacks layers of the encoder, as where a strategy exchanges some of them only.
        """
        with set_active_stages(self.method, depth=phase_at(self.phases, round).depth):
            layers = self.layers(file)
            needed = {name for name in exchanged_names(self.method) if name.startswith("encoder.")}
            if not layers.keys() >= needed:
                raise InputError(
                    f"{file} has {len(needed & layers.keys())} of the {len(needed)} layers of the encoder, for the "
                    "strategy exchanges no more; choose another figure, or a run of another strategy"
                )
            load_layers(self.method, layers)
            yield self.method


def load_run_folder(folder: Path, overrides: Sequence[str]) -> LoadedRun:
    """Open a run folder that keeps models.

    Parameters
    ----------
    folder : Path
    overrides : sequence of str
        The user's own, which name folders of settings that the run was made with.

    Raises
    ------
    InputError
        It keeps no models, or its settings cannot be used.
    """
    kept = kept_rounds(folder)
    saved = {word.partition("=")[0] for word in read_overrides(folder / "overrides.yaml") or []}
    overrides = [*overrides, *(word for key, word in RESUME_OVERRIDES.items() if key in saved)]
    settings = load_settings([*overrides, f"resume={quote_value(str(folder.resolve()))}"])
    return LoadedRun(folder, settings, kept, configure_process(settings.machine))
