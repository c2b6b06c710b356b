"""Models of single clients, for strategies with ``models_per_client``: in files, read when they are needed.

A file is a version of a model after a round, as with client states: the newest version up to the round of a checkpoint
belongs to the checkpoint. Versions that no resumed run needs are deleted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from fedssl.atomic_files import atomic_write, delete_old_rounds, round_file
from fedssl.errors import RunError, sanitize
from fedssl.runs.manifest import CLIENT_MODELS, MODEL_SUFFIX, Part, client_folder, file_part
from fedssl.safe_io import read_tensors
from server_app.serialization import to_arrays, to_serializable
from strategies.types import GlobalModel

Check = Callable[[str, GlobalModel], None]  # raises `ValueError` for a model that the run cannot have
Value = TypeVar("Value")
Result = TypeVar("Result")


class MappedValues(Mapping[str, Result]):
    """Mapping whose values are computed from those of another mapping whenever they are needed."""

    def __init__(self, values: Mapping[str, Value], function: Callable[[Value], Result]) -> None:
        self._values, self._function = values, function

    def __getitem__(self, name: str) -> Result:
        return self._function(self._values[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class ClientModels(Mapping[str, GlobalModel]):
    """Immutable mapping of models by name. ``parts`` are their files in the run folder ``folder``.

    ``unsaved`` models are in memory. ``check`` validates a model that is read.
    """

    def __init__(
        self,
        folder: Path,
        parts: Mapping[str, Part],
        *,
        unsaved: Mapping[str, GlobalModel] | None = None,
        check: Check = lambda name, model: None,
    ) -> None:
        self._folder, self._parts, self._unsaved, self._check = folder, parts, unsaved or {}, check

    @classmethod
    def of_checkpoint(cls, folder: Path, parts: Sequence[Part], check: Check) -> "ClientModels":
        models = (part for part in parts if part.path.startswith(f"{CLIENT_MODELS}/"))
        return cls(folder, {Path(part.path).parent.name: part for part in models}, check=check)

    def __getitem__(self, name: str) -> GlobalModel:
        return self._unsaved[name] if name in self._unsaved else self._read(name, self._parts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._parts, *self._unsaved}, key=int))

    def __len__(self) -> int:
        return len({*self._parts, *self._unsaved})

    def __contains__(self, name: object) -> bool:
        return name in self._unsaved or name in self._parts

    @property
    def parts(self) -> list[Part]:
        """Return the files of all models, of which none must be unsaved."""
        assert not self._unsaved
        return list(self._parts.values())

    def updated(self, models: Mapping[str, GlobalModel]) -> "ClientModels":
        """Return the models with new versions of some, which are unsaved."""
        return ClientModels(self._folder, self._parts, unsaved={**self._unsaved, **models}, check=self._check)

    def saved(self, *, round: int, oldest_resumable: int) -> "ClientModels":
        """Write the unsaved models as versions of ``round``, and return the models without unsaved ones.

        Delete versions that a run resumed from the round ``oldest_resumable`` or later does not need.
        """
        written = {}
        for name, model in self._unsaved.items():
            folder = client_folder(self._folder / CLIENT_MODELS, int(name))
            folder.mkdir(parents=True, exist_ok=True)
            file = round_file(folder, round, MODEL_SUFFIX)
            content = to_serializable(model)
            atomic_write(file, lambda stream, content=content: torch.save(content, stream))  # type: ignore[misc]  # lambda with a default
            written[name] = file_part(self._folder, file)
            delete_old_rounds(folder, MODEL_SUFFIX, oldest_resumable=oldest_resumable)
        return ClientModels(self._folder, {**self._parts, **written}, check=self._check)

    def _read(self, name: str, part: Part) -> GlobalModel:
        file = self._folder / part.path
        try:
            model = GlobalModel(**to_arrays(read_tensors(file, max_bytes=part.size)))
            self._check(name, model)
        except Exception as error:  # reading a damaged file can raise anything
            raise RunError(
                f"{file} cannot be read ({sanitize(error)[:200]}); resume the run from an intact checkpoint"
            ) from error
        return model
