import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.datasets.holdout import NO_LABEL
from fedssl.errors import InputError
from fedssl.partition import dirichlet, from_file, write_partition
from tests.fedssl.partition.made import partition_input

LABELS = torch.tensor([0, 1, 0, 1, 2, 2])


def read(file: Path, text: str, labels: torch.Tensor | None = LABELS, num_clients: int = 2) -> list[list[int]]:
    file.write_text(text)
    parts = from_file(partition_input(labels, num_images=6, num_clients=num_clients), file=file)
    return [part.tolist() for part in parts]


def test_files_of_excel(tmp_path: Path) -> None:
    text = "label;client\r\n" + "".join(f"{label};{label % 2}\r\n" for label in LABELS.tolist())
    assert read(tmp_path / "a.csv", "\ufeff" + text) == read(tmp_path / "a.csv", text) == [[0, 2, 4, 5], [1, 3]]
    (tmp_path / "a.csv").write_bytes(("sep=;\r\n" + text).encode("utf-16"))
    assert [len(part) for part in from_file(partition_input(LABELS, num_clients=2), file=tmp_path / "a.csv")] == [4, 2]


def test_an_empty_line_of_one_column_is_an_unused_image(tmp_path: Path) -> None:
    assert read(tmp_path / "a.csv", "client\n0\n\n1\n1\n\n0\n\n\n") == [[0, 5], [2, 3]]


def test_round_trip(tmp_path: Path) -> None:
    labels = torch.arange(300) % 5
    labels[7] = NO_LABEL
    data = partition_input(labels, num_clients=4, seed=3)
    parts = dirichlet(data, alpha=0.3, min_size=2)
    parts[2] = parts[2][:-3]  # three belong to no client
    file = tmp_path / "partition.csv"
    file.write_text(write_partition(parts, labels))
    again = from_file(replace(data, seed=8), file=file)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_the_file_has_lines_for_images_of_the_server(tmp_path: Path) -> None:
    data, rows = partition_input(LABELS, num_clients=2), torch.tensor([0, 1, 3, 5])
    file = tmp_path / "a.csv"
    file.write_text("client,label\n0,0\n1,1\n,0\n0,1\n1,2\n,2\n")
    rest = replace(data, labels=LABELS[rows], images=replace(data.images, rows=rows))
    assert [part.tolist() for part in from_file(rest, file=file)] == [[0, 2], [1]]  # places in ``rows``
    file.write_text("client,label\n0,0\n1,1\n,0\n0,2\n1,2\n,2\n")
    with pytest.raises(InputError, match="image 3 has label 2 in the file and 1 in the data set"):
        from_file(rest, file=file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with ''; its first line must be client, or client,label"),
        ("owner\n1\n", "begins with 'owner'"),
        ("client,client\n" + "0,1\n" * 3, "begins with 'client,client'"),  # 6 numbers, but of 3 images
        ("client\n" + "1" * 200_000, "is not a CSV file (field larger than field limit (131072))"),
        ("client\n" + "0\n1\n" * 2, "has 4 images, but the data set has 6"),
        ("client\n0\nx\n" + "1\n" * 4, "line 3: 'x' is no client; write a whole number from 0"),
        ("client\n0\n-1\n" + "1\n" * 4, "line 3: '-1' is no client"),
        ("client\n0\n2\n" + "1\n" * 4, "line 3: there is no client 2; the num_clients=2 clients are 0 to 1"),
        ("client,label\n0\n", "line 2, has 1 values for the 2 columns client,label"),
        ("client,label\n0,-1\n", "line 2: '-1' is no label"),
        ("client,label\n0,0\n0,1\n0,0\n1,\n1,2\n1,2\n", "image 3 has label -1 in the file and 1 in the data set"),
        ("client,label\n0,0\n0,1\n0,0\n1,2\n1,1\n1,2\n", "image 3 has label 2 in the file and 1 in the data set"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read(tmp_path / "a.csv", text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "message"), [(None, "needs partition.file"), ("/no/such", "=/no/such does not exist")]
)
def test_a_file_must_be_there(file: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_file(partition_input(LABELS, num_clients=2), file=file)
