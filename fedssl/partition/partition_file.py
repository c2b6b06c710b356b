"""Partitions in CSV files, such as the partition of a published comparison."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from fedssl.errors import InputError
from fedssl.partition.partition import PartitionInput
from fedssl.partition.partitioners import check_counts
from fedssl.safe_io import MAX_LINES_BYTES, read_text, sanitize

COLUMNS = ("client", "label")
_MAX_DIGITS = 9  # of a client's number


def from_file(data: PartitionInput, *, file: str | Path | None) -> list[np.ndarray]:
    r"""Read the client of every image from a file.

    $$
    D_k = \{ i : k_i = k \}
    $$

    with $k_i$ the entry of the file for image i.

    Parameters
    ----------
    file : str or Path
        A CSV file with one line per image, in the order of the data set, and the column ``client``: the client's
        number, or empty for no client. An optional column ``label``, empty for no label, must equal the labels of the
        images. It detects other images and another order.
    """
    check_counts(data)
    num_images, num_clients = data.num_images, data.num_clients
    if file is None:
        raise InputError("partition=file needs partition.file, a CSV file with one line per image; set it")
    setting = f"partition.file={file}"
    clients, labels = _read(Path(file), num_clients, setting)
    if len(clients) != num_images:
        raise InputError(
            f"{setting} has {len(clients)} images, but the data set has {num_images}; choose the data set of the file"
        )
    if labels is not None and data.labels is not None and not np.array_equal(labels, data.labels.numpy()):
        index = int(np.flatnonzero(labels != data.labels.numpy())[0])
        raise InputError(
            f"{setting} belongs to other images or another order: image {index} has label {labels[index]} in the file "
            f"and {int(data.labels[index])} in the data set; choose the data set of the file"
        )
    order = np.argsort(clients, kind="stable")
    return np.split(order, np.searchsorted(clients[order], np.arange(num_clients + 1)))[1:-1]


def write_partition(parts: Iterable[np.ndarray], labels: torch.Tensor) -> str:
    """Return the text of the file that `from_file` reads, from every client's indices and all labels ``(n,)``."""
    clients = np.full(len(labels), -1)
    for client, part in enumerate(parts):
        clients[part] = client
    numbers = zip(clients.tolist(), labels.tolist(), strict=True)
    rows = (",".join("" if number < 0 else str(number) for number in row) for row in numbers)
    return "\n".join([",".join(COLUMNS), *rows, ""])


def _read(file: Path, num_clients: int, setting: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the client of every image ``(n,)``, -1 for none, and the labels, None without the column."""
    text = read_text(file, max_bytes=MAX_LINES_BYTES)
    if text is None:
        raise InputError(f"{setting} does not exist; choose a CSV file with one line per image")
    try:
        names, *rows = list(csv.reader(io.StringIO(text))) or [[]]
    except csv.Error as error:
        raise InputError(f"{setting} is not a CSV file ({error}); choose a CSV file with one line per image") from error
    if sorted(names) not in (["client"], ["client", "label"]):
        header = sanitize(",".join(names))[:50]
        raise InputError(f"{setting} begins with {header!r}; its first line must be client, or client,label")
    columns: dict[str, list[int]] = {name: [] for name in names}
    for line, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise InputError(f"{setting}, line {line}, has {len(row)} values for {len(names)} columns")
        for name, value in zip(names, row, strict=True):
            columns[name].append(_number(value, name, num_clients, f"{setting}, line {line}"))
    labels = np.array(columns["label"]) if "label" in names else None
    return np.array(columns["client"], dtype=np.int64), labels


def _number(value: str, name: str, num_clients: int, location: str) -> int:
    if not value.strip():  # no client, or no label
        return -1
    if not (value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS):
        raise InputError(f"{location}: {sanitize(value)[:50]!r} is no {name}; write a whole number from 0")
    if name == "client" and int(value) >= num_clients:
        raise InputError(
            f"{location}: there is no client {value}; the {num_clients} clients are 0 to {num_clients - 1}"
        )
    return int(value)
