"""Labels of several files of a data set: numbers by name, and rows without a label."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.labels import read_labels
from fedssl.errors import InputError

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


def write(file: Path, labels: pa.Array, names: list[str] | None = None) -> Path:
    """Write a file with a column of labels, of the type ClassLabel if there are names."""
    contents = pa.table({"label": labels})
    if names is not None:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        contents = contents.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(contents, file)
    return file


def names_of(files: list[Path]) -> list[list[str | None]]:
    """Read each file as a split of all, and return the names of its labels."""
    read = [read_labels([file], "label", data_set=files) for file in files]
    assert len({classes for _, classes in read}) == 1  # one list
    return [[None if label == NO_LABEL else classes[label] for label in labels] for labels, classes in read]


def test_classes_of_several_files_are_joined_by_name(tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", pa.array([0, 1, 2]), ["a", "b", "c"])
    test = write(tmp_path / "test.parquet", pa.array([0, 1, -1]), ["a", "c"])
    assert names_of([train, test]) == [["a", "b", "c"], ["a", "c", None]]
    assert names_of([test, train]) == [["a", "c", None], ["a", "b", "c"]]
    labels, classes = read_labels([test, train], "label", data_set=[])  # two shards of one split
    assert (labels.tolist(), classes) == ([0, 2, -1, 0, 1, 2], ("a", "b", "c"))  # the numbers of the longer list
    other = write(tmp_path / "other.parquet", pa.array([0, 1]), ["d", "a"])
    assert names_of([test, other]) == [["a", "c", None], ["d", "a"]]  # no file has all names
    assert read_labels([test], "label", data_set=[other])[1] == ("a", "c", "d")
    turned = write(tmp_path / "turned.parquet", pa.array([0, 1]), ["c", "a"])
    assert names_of([test, turned]) == [["a", "c", None], ["c", "a"]]


def test_names_beside_numbers_are_refused_if_rows_have_labels(tmp_path: Path) -> None:
    named = write(tmp_path / "train.parquet", pa.array([0, 1]), ["a", "b"])
    numbers = write(tmp_path / "test.parquet", pa.array([1, 0]))
    message = r"^dataset\.label=label has class names in .*train\.parquet but numbers without names in .*test\.parquet"
    with pytest.raises(InputError, match=message):
        read_labels([named], "label", data_set=[named, numbers])
    unlabeled = write(tmp_path / "unlabeled.parquet", pa.array([-1, None]))
    assert names_of([named, unlabeled]) == [["a", "b"], [None, None]]
    # Names that do not cover the numbers describe something else.
    wrong = write(tmp_path / "wrong.parquet", pa.array([0, 7]), ["a", "b"])
    labels, classes = read_labels([wrong], "label", data_set=[numbers])
    assert (labels.tolist(), classes) == ([0, 7], ())


def test_truth_values_are_names(tmp_path: Path) -> None:
    file = write(tmp_path / "train.parquet", pa.array([True, False, None]))
    assert names_of([file]) == [["True", "False", None]]
    other = write(tmp_path / "test.parquet", pa.array(["Unsure", "True"]))
    assert names_of([file, other]) == [["True", "False", None], ["Unsure", "True"]]
    with Path(tmp_path / "excel.csv").open("w") as stream:
        stream.write("path;label\n1.png;TRUE\n2.png;FALSE\n3.png;\n")
    assert names_of([tmp_path / "excel.csv"]) == [["True", "False", None]]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            pa.array([[1, 2], [0]]),
            r"of type list<.*> in .* \(several labels per image, for evaluation=multi_label\); one class per image is",
        ),
        (
            pa.array([0.5, 1.0]),
            r"of type double in .*train\.parquet \(it has the value 0\.5, for evaluation=regression\)",
        ),
        (pa.array([float("inf")]), r"of type double .* \(it has the value inf, .*\)"),
        (pa.array([2**63], pa.uint64()), r"of type uint64 .* not in range"),
        (
            pa.array([b"\xff"]),
            r"of type binary .*; one class per image .* or dataset\.label=null where no labels are needed$",
        ),
        (pa.array([0], pa.date32()), r"of type date32\[day\] in .* \(it holds no classes\)"),
    ],
)
def test_other_types_are_one_sentence(tmp_path: Path, column: pa.Array, message: str) -> None:
    file = write(tmp_path / "train.parquet", column)
    with pytest.raises(InputError, match=r"^dataset\.label=label is " + message):
        read_labels([file], "label", data_set=[file])


@pytest.mark.parametrize(
    ("column", "labels", "message"),
    [
        (pa.array(["a|b", "a", None]), [1, 0, -1], "'a|b', each of which is one class; for several labels per image"),
        (pa.array([-1, 1, -1]), [-1, 1, -1], "-1 is read as no label; write 0 and 1 if these are two classes"),
        (pa.array([None, 1, -1]), [-1, 1, -1], None),
        (pa.array(["Cat", "cat ", "dog"]), [0, 1, 2], "Cat, cat differ only in case and are several classes; write"),
        (pa.array(["caf\u00e9", "cafe\u0301"]), [0, 0], None),
        (pa.array([-1, 1, 0]), [-1, 1, 0], None),
    ],
)
def test_labels_that_may_be_misread_are_a_warning(
    tmp_path: Path, column: pa.Array, labels: list[int], message: str | None, log_again: None, caplog
) -> None:
    file = write(tmp_path / "train.parquet", column)
    assert read_labels([file], "label", data_set=[file])[0].tolist() == labels
    assert caplog.messages == [line for line in caplog.messages if message is not None and message in line]
    assert bool(caplog.messages) == (message is not None)
