"""The images of a run's clients, in the size of its encoder, with the client of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedssl.config.literal import user_path
from fedssl.config.load import IMAGES_FILE, default_unlabeled_partition, load_settings
from fedssl.config.overrides import quote_value
from fedssl.datasets.base import ImageData, load_federated, select
from fedssl.datasets.geometry import fit_tensor
from fedssl.datasets.raster import convert, unit_values
from fedssl.embedding.image_list import Block
from fedssl.errors import InputError
from fedssl.explore.columns import Column, coded
from fedssl.explore.images import sample
from fedssl.partition.partition import client_indices, clients_of_rows
from fedssl.safe_io import read_text, sanitize_line, valid_text


@dataclass(frozen=True)
class RunImages:
    """Images that the clients of a simulation have."""

    name: str
    data: ImageData
    numbers: np.ndarray  # of the images in the data set, int64 ``(n,)``
    clients: np.ndarray  # int64, ``(n,)``, -1 for images of no client
    root: Path | None = None  # folder of the data set

    def __len__(self) -> int:
        return len(self.data.images)

    def blocks(self, size: int) -> Iterator[Block]:
        start = 0
        for images in self.data.images.chunks(size):
            end = start + len(images)
            yield Block(rows=np.arange(start, end), images=images.numpy(), unreadable={}, end=end)
            start = end

    def decode(self, rows: np.ndarray, *, size: int) -> np.ndarray:
        images = self.data.images[torch.from_numpy(rows)]
        dtype = str(images.dtype).removeprefix("torch.")
        fitted = fit_tensor(unit_values(images), size).clamp(0, 1).numpy()
        return convert(fitted, "uint8") if dtype == "uint8" else fitted

    def names(self, rows: np.ndarray) -> list[str]:
        if self.data.origin is None:
            return [f"image {number}" for number in self.numbers[rows]]
        index, of_index = self.data.origin
        return [
            valid_text(place._replace(file=_below(Path(place.file), self.root)).name)
            for place in index.places(of_index[rows])
        ]

    def columns(self, rows: np.ndarray, further: Sequence[str]) -> list[Column]:
        if further:
            raise InputError(f"columns={','.join(further)} are those of images=PATH; add images=PATH")
        names = [f"client {number}" for number in range(int(self.clients.max()) + 1)]
        found = [coded("client", self.clients[rows], names)]
        if self.data.labels is not None:
            found.insert(0, coded("label", self.data.labels.numpy()[rows], self.data.classes))
        if self.data.owners is not None:
            found.append(coded("owner", self.data.owners.numpy()[rows], self.data.owner_names))
        return found

    def check(self, unreadable: dict[int, str]) -> str:
        return ""

    def sampled(self, limit: int) -> "RunImages":
        rows = sample(len(self), limit)
        data = select(self.data, torch.from_numpy(rows))
        return replace(self, data=data, numbers=self.numbers[rows], clients=self.clients[rows])


def load_run_images(run: Path, *, channels: int, size: int, overrides: Sequence[str]) -> RunImages:
    """Load the images of a run's clients; `InputError` if they are on devices, or have changed since the run."""
    settings = load_settings([*overrides, f"resume={quote_value(str(run.resolve()))}"])
    if settings.data.channels != channels:
        raise InputError(f"the encoder takes {channels} channels but the images of {run} have {settings.data.channels}")
    data = load_federated(settings.data.resized(size))
    saved = read_text(run / IMAGES_FILE)
    if saved is not None and data.origin is not None and (found := data.origin[0].describe_files()) != saved.strip():
        raise InputError(
            f"the clients' images are in {found}, and were in {sanitize_line(saved.strip())} when the run started; "
            "restore the files, or add images=PATH"
        )
    if data.labels is None:
        settings = default_unlabeled_partition(settings)
    clients = clients_of_rows(client_indices(settings.partition, data), len(data.images))
    path = settings.data.reader.values.get("path")
    root = None if path is None else user_path(str(path)).absolute()
    return RunImages(settings.data.name, data, np.arange(len(data.images)), clients, root)


def _below(file: Path, root: Path | None) -> str:
    """Return a path below ``root``, or the name of a file elsewhere: a page has no path of this machine."""
    file = file.absolute()
    return file.relative_to(root).as_posix() if root is not None and root in file.parents else file.name
