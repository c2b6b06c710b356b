"""Partitions in CSV files, such as the partition of a published comparison."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from fedssl.csv_file import client_in, count_in, read_rows
from fedssl.errors import InputError
from fedssl.partition.partition import PartitionInput
from fedssl.partition.partitioners import check_counts


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
    numbers: dict[str, list[int]] = {"client": [], "label": []}  # -1: none
    rows = read_rows(Path(file), "client", "client,label", setting=setting, content="with one line per image")
    for place, values in rows:
        for name, text in values.items():
            if not text.strip():
                number = -1
            elif name == "client":
                number = client_in(text, place, num_clients=num_clients)
            else:
                number = count_in(text, name, place)
            numbers[name].append(number)
    clients = np.array(numbers["client"], dtype=np.int64)
    if len(clients) != num_images:
        raise InputError(
            f"{setting} has {len(clients)} images, but the data set has {num_images}; choose the data set of the file"
        )
    labels = np.array(numbers["label"])
    if len(labels) and data.labels is not None and not np.array_equal(labels, data.labels.numpy()):
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
    return "\n".join(["client,label", *rows, ""])
