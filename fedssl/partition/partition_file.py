"""A division that a file lists, such as one that several programs are compared on."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from fedssl.errors import InputError
from fedssl.partition.base import ImageSubset
from fedssl.partition.partitioners import MIN_IMAGES, check_counts
from fedssl.untrusted import MAX_LINES_BYTES, read_text, sanitize

COLUMNS = ("client", "label")
_DIGITS = 9  # more of them are no number of a client


def from_file(
    labels: torch.Tensor | None,
    *,
    owners: torch.Tensor | None = None,
    images: ImageSubset | None = None,
    num_images: int,
    num_clients: int,
    seed: int,
    file: str | Path | None,
) -> list[np.ndarray]:
    """Every image belongs to the client that the file says.

    Parameters
    ----------
    file : str or Path
        A CSV file with a column ``client`` and a line for each image, in the order of the data set: the number of
        its client, nothing if it is nobody's. Where there is a column ``label`` as well, the images must have those
        labels: other images, or the same ones in another order, are refused.

    Raises
    ------
    InputError
        The file is not there, is not such a table, is one of other images, or leaves a client with too few.
    """
    check_counts(num_images, num_clients)
    if file is None:
        raise InputError("partition=file needs partition.file, a CSV file with a line for each image; name it")
    said = f"partition.file={file}"
    clients, known = _read(Path(file), num_clients, said)
    if len(clients) != num_images:
        raise InputError(f"{said} is of {len(clients)} images, but {num_images} are to be divided; name its data")
    if known is not None and labels is not None and not np.array_equal(known, labels.numpy()):
        place = int(np.flatnonzero(known != labels.numpy())[0])
        raise InputError(
            f"{said} is of other images, or of another order: image {place} has label {known[place]} there and "
            f"{int(labels[place])} in the data; name its data"
        )
    parts = [np.flatnonzero(clients == client) for client in range(num_clients)]
    few = [client for client, part in enumerate(parts) if len(part) < MIN_IMAGES]
    if few:
        raise InputError(
            f"{said} gives client {few[0]} {len(parts[few[0]])} images, too few to train on ({MIN_IMAGES}); "
            "clients are the numbers from 0 to num_clients - 1"
        )
    return parts


def write_partition(parts: Iterable[np.ndarray], labels: torch.Tensor) -> str:
    """Text of the file that `listed` reads.

    Parameters
    ----------
    parts : iterable of ndarray
        Positions of every client's images.
    labels : Tensor
        int64, ``(n,)``, of all images.
    """
    clients = np.full(len(labels), -1)
    for client, part in enumerate(parts):
        clients[part] = client
    rows = (f"{'' if client < 0 else client},{label}" for client, label in zip(clients, labels.tolist(), strict=True))
    return "\n".join([",".join(COLUMNS), *rows, ""])


def _read(file: Path, num_clients: int, said: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Client of every image ``(n,)``, -1 for nobody, and their labels if they are there."""
    text = read_text(file, max_bytes=MAX_LINES_BYTES)
    if text is None:
        raise InputError(f"{said} is not there; name a CSV file with a line for each image")
    try:
        names, *rows = list(csv.reader(io.StringIO(text))) or [[]]
    except csv.Error as error:
        raise InputError(f"{said} is no CSV file ({error}); name one with a line for each image") from error
    if sorted(names) not in (["client"], ["client", "label"]):
        found = sanitize(",".join(names))[:50]
        raise InputError(f"{said} begins with {found!r}; its first line must be client, or client,label")
    columns: dict[str, list[int]] = {name: [] for name in names}
    for line, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise InputError(f"{said}, line {line}, has {len(row)} values for {len(names)} columns")
        for name, word in zip(names, row, strict=True):
            columns[name].append(_number(word, name, num_clients, f"{said}, line {line}"))
    labels = np.array(columns["label"]) if "label" in names else None
    return np.array(columns["client"], dtype=np.int64), labels


def _number(word: str, name: str, num_clients: int, said: str) -> int:
    if name == "client" and not word.strip():
        return -1
    if not (word.isascii() and word.isdigit() and len(word) <= _DIGITS):
        raise InputError(f"{said}: {sanitize(word)[:50]!r} is no {name}; write a whole number from 0")
    if name == "client" and int(word) >= num_clients:
        raise InputError(f"{said}: there is no client {word}; the {num_clients} clients are 0 to {num_clients - 1}")
    return int(word)
