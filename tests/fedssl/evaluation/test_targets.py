"""Targets in columns of parquet files and in CSV files, in the forms that people write."""

import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedssl.datasets.base import forget_images
from fedssl.errors import InputError
from fedssl.evaluation.protocol import evaluation_problem, make_evaluation_input
from fedssl.evaluation.targets import as_labels, as_numbers, read_targets, varying
from tests.fedssl.datasets.made import make_image, png, settings_of

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "expected", "names"),
    [
        ([0, 1, None, -1], [[0], [1], [NAN], [NAN]], ["x_0"]),
        ([True, False], [[1], [0]], ["x_0"]),
        (["1", "0.0", "", "False"], [[1], [0], [NAN], [0]], ["x_0"]),
        ([[0, 1, 1], [1, 0, -1], None], [[0, 1, 1], [1, 0, NAN], [NAN] * 3], ["x_0", "x_1", "x_2"]),
        ([[0.0, NAN], [1.0, 0.0]], [[0, NAN], [1, 0]], ["x_0", "x_1"]),
        ([[4], [], [0, 4], None], [[0, 1], [0, 0], [1, 1], [NAN, NAN]], ["0", "4"]),
        ([["cat"], [" dog", "cat"], []], [[1, 0], [1, 1], [0, 0]], ["cat", "dog"]),
        (["Mass|Nodule", "Mass", "", None], [[1, 1], [1, 0], [0, 0], [NAN, NAN]], ["Mass", "Nodule"]),
        (list(np.array([[0, 1], [1, 1]], dtype=np.uint8)), [[0, 1], [1, 1]], ["x_0", "x_1"]),
    ],
)
def test_labels_have_many_forms(values, expected, names):
    matrix, titles = as_labels("x", values)
    np.testing.assert_array_equal(matrix, expected)
    assert list(titles) == names


def test_numbers_have_many_forms():
    matrix, titles = as_numbers("x", [1, None, "2.5", "", NAN, True])
    np.testing.assert_array_equal(matrix[:, 0], [1, NAN, 2.5, NAN, NAN, 1])
    assert titles == ("x_0",)
    matrix, _ = as_numbers("x", [[1, 2], None, (3, None)])
    np.testing.assert_array_equal(matrix, [[1, 2], [NAN, NAN], [3, NAN]])


@pytest.mark.parametrize(
    ("convert", "values", "message"),
    [
        (as_labels, [0, 1, 2], "value 2, but labels are 0, 1, or null .* evaluation=regression"),
        (as_labels, [0, 0.5], "value 0.5"),
        (
            as_labels,
            ["", "cat", "dog"],
            r"value 'cat', but labels are 0, 1, and blank for unknown, or names .*, such as 'cat\|' for one; name",
        ),
        (as_labels, [[], [""], None], "the column 'x' names no class; name other columns"),
        (as_numbers, ["3_5", "2"], "value '3_5', but targets are numbers"),
        (as_labels, [["a"], [1, 2, 3]], "lists of other things"),
        (as_numbers, ["1,5"], "value '1,5', but targets are numbers; write decimal points, or name other"),
        (as_numbers, [[1, 2], [1, 2, 3]], "3 and 2 targets per image"),
        (as_numbers, [[1, 2], 3], "2 and 1 targets per image"),
    ],
)
def test_other_values_are_refused(convert, values, message):
    with pytest.raises(InputError, match=message):
        convert("x", values)


def test_varying():
    targets = torch.tensor([[1, NAN, NAN, 1, NAN], [1, 2, NAN, NAN, 1], [1, 3, NAN, NAN, 2.0]])
    assert varying(targets).tolist() == [False, True, False, False, True]


def images_in_folders(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), number).save(folder / name)


def read_csv(folder: Path, text: str, *, columns=None):
    (folder / "t.csv").write_text(text)
    forget_images()
    data = settings_of("folder", path=str(folder), size=4, folders="none")
    subject = make_evaluation_input(None, data, device=torch.device("cpu"), needs_labels=False)
    assert subject is not None
    return read_targets(subject, columns=columns, file=str(folder / "t.csv"), convert=as_numbers)


@pytest.mark.parametrize("file", ["train/{}.png", "{}"])
def test_accents_have_two_forms(tmp_path: Path, file: str):
    """macOS writes the letters of names and their accents one by one."""
    apart, together = (unicodedata.normalize(form, "é") for form in ("NFD", "NFC"))
    images_in_folders(tmp_path, f"train/{apart}.png", "train/b.png", "test/c.png")
    text = f"file,x\n{file.format(together)},1\n{file.format('b')},2\n{file.format('c').replace('train', 'test')},3\n"
    result = read_csv(tmp_path, text)
    assert sorted(result.train[:, 0].tolist()) == [1, 2]


def test_csv_files_name_images_by_path_or_by_name(tmp_path: Path):
    images_in_folders(tmp_path, "train/a.png", "train/b.png", "test/a.png")
    by_path = "\ufefffile,x,y\ntrain/b.png,2,\ntest/a.png,3,30\ntrain/a.png,1,10\n"
    result = read_csv(tmp_path, by_path)
    np.testing.assert_array_equal(result.train, [[1, 10], [2, NAN]])
    np.testing.assert_array_equal(result.test, [[3, 30]])
    assert result.names == ("x", "y")
    assert read_csv(tmp_path, by_path, columns=["y"]).names == ("y",)
    for folder in (f"../{tmp_path.name}/", "labels/../"):
        above = by_path.replace("train/", f"{folder}train/")
        np.testing.assert_array_equal(read_csv(tmp_path, above).train, [[1, 10], [2, NAN]])
    np.testing.assert_array_equal(read_csv(tmp_path, by_path.replace("/", "\\")).train, [[1, 10], [2, NAN]])
    assert read_csv(tmp_path, by_path.replace(",", ";")).names == ("x", "y")
    with pytest.raises(
        InputError, match=r"several images or rows have the names a.png of .*t.csv; give paths from its folder"
    ):
        read_csv(tmp_path, "file,x\na.png,1\nb.png,2\n")
    (tmp_path / "test/a.png").rename(tmp_path / "test/c.png")
    result = read_csv(tmp_path, "id,x\na,1\nb,2\nc,3\n")
    assert (result.train[:, 0].tolist(), result.test[:, 0].tolist()) == ([1, 2], [3])
    for old, new in (("train/a", "train/v1.0"), ("train/b", "train/v1.1")):  # whose endings without the true one differ
        (tmp_path / f"{old}.png").rename(tmp_path / f"{new}.png")
    result = read_csv(tmp_path, "id,x\nv1.0,1\nv1.1,2\nc,3\n")
    assert (result.train[:, 0].tolist(), result.test[:, 0].tolist()) == ([1, 2], [3])
    with pytest.raises(InputError, match="several images or rows have the names c.1 of "):
        read_csv(tmp_path, "id,x\nv1.0,1\nc.1,2\nc.2,3\n")


def test_all_pages_have_the_row_of_their_file(tmp_path: Path):
    for name in ("train/a", "train/b", "test/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / name, np.zeros((2, 4, 4, 3), np.uint8))
    for folders in (("train/", "test/"), ("", "")):  # by path, and by name
        train, test = folders
        files = f"file,x\n{train}a.npy,1\n{train}b.npy,2\n{test}c.npy,3\n"
        result = read_csv(tmp_path, files)
        assert (result.train[:, 0].tolist(), result.test[:, 0].tolist()) == ([1, 1, 2, 2], [3, 3])
        result = read_csv(tmp_path, f"{files}{train}b.npy[1],4\n")
        assert result.train[:, 0].tolist() == [1, 1, 2, 4]
        result = read_csv(tmp_path, f"file,x\n{train}b.npy[1],4\n{train}a.npy[0],5\n{test}c.npy[1],6\n")
        np.testing.assert_array_equal(result.train[:, 0], [5, NAN, NAN, 4])
        np.testing.assert_array_equal(result.test[:, 0], [NAN, 6])
    (tmp_path / "test/c.npy").rename(tmp_path / "test/a.npy")
    for name in ("a.npy", "a.npy[0]", "a"):
        with pytest.raises(InputError, match=r"several images or rows have the names a"):
            read_csv(tmp_path, f"file,x\n{name},1\n")


@pytest.mark.parametrize("none", ["", '""'])
def test_blank_cells_mean_no_label_in_every_csv_file(tmp_path: Path, none: str):
    names = [f"{folder}/{name}.png" for folder in ("train", "test") for name in "abc"]
    images_in_folders(tmp_path, *names)
    tags = ["Mass|Nodule", none, "NA", "Nodule", none, "Mass"]
    rows = [f"{name},{tag},{name.partition('/')[0]}\n" for name, tag in zip(names, tags, strict=True)]
    (tmp_path / "list.csv").write_text("path,tags,split\n" + "".join(rows))
    for path, file in ((tmp_path / "list.csv", None), (tmp_path, str(tmp_path / "list.csv"))):
        data = settings_of("folder", path=str(path), size=4, label=None, folders="none")
        subject = make_evaluation_input(None, data, device=torch.device("cpu"), needs_labels=False)
        result = read_targets(subject, columns=["tags"], file=file, convert=as_labels)
        places = [result.names.index(name) for name in ("Mass", "Nodule")]
        np.testing.assert_array_equal(result.train[:, places], [[1, 1], [0, 0], [NAN if file is None else 0] * 2])
        np.testing.assert_array_equal(result.test[:, places], [[0, 1], [0, 0], [1, 0]])


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("file,x\nother.png,1\n", None, "has no row of the 2 training images; .* its first column, such as .*png"),
        ("file,x\ntrain/a.png,1\ntrain/a.png,2\n", None, "several rows of train/a.png; keep one row per image"),
        ("file,x\n./train//a.png,1\ntrain/a.png,2\n", None, r"several rows of ./train//a.png, train/a.png; keep one"),
        ("file,x\ntrain/a.png,1\n", ["z"], r"has no column z after the first; it has \['x'\]"),
        ("file\ntrain/a.png\n", None, "has no column"),
        ("", None, "has no column"),
        ("file,x\n\n\ntrain/a.png,1,5\n", None, "t.csv, line 4, has 3 values for the 2 columns file,x"),
        ('file,x\n"train/a.png,1\n' + "x" * 2**18, None, "is not a CSV file"),
        ("file,x\ntrain/a.png,inf\ntest/a.png,1\n", None, "x have 1 infinite values"),
    ],
)
def test_other_csv_files_are_refused(tmp_path: Path, text: str, columns, message: str):
    images_in_folders(tmp_path, "train/a.png", "train/b.png", "test/a.png")
    with pytest.raises(InputError, match=message):
        read_csv(tmp_path, text, columns=columns)


def test_arrays_of_labels_are_those_of_the_split(tmp_path: Path):
    """ChestMNIST's form: ``(n, 14)`` labels beside the images, in an order that ``limit`` selects from."""
    images = np.arange(10 * 16, dtype=np.uint8).reshape(10, 4, 4)
    labels = np.array([[number % 2, number > 4] for number in range(10)], dtype=np.float32)
    labels[9, 0] = NAN
    arrays = {"train_images": images, "train_labels": labels, "test_images": images[:3], "test_labels": labels[7:]}
    np.savez(tmp_path / "chest.npz", **arrays)
    data = settings_of(
        "medmnist", path=str(tmp_path / "chest.npz"), label=None, size=4, channels=1, limit=4, mean=[0], std=[1]
    )
    subject = make_evaluation_input(None, data, device=torch.device("cpu"), needs_labels=False)
    result = read_targets(subject, columns=["labels"], file=None, convert=as_labels)
    numbers = subject.train.images[:][:, 0, 0, 0] // 16  # of the images that the limit leaves
    assert len(numbers) == 4
    np.testing.assert_array_equal(result.train, labels[numbers.numpy()])
    np.testing.assert_array_equal(result.test, labels[7:])
    assert result.names == ("labels_0", "labels_1")
    with pytest.raises(InputError, match="has no array whose name contains 'tags'"):
        read_targets(subject, columns=["tags"], file=None, convert=as_labels)


def test_columns_are_those_of_the_readable_images(tmp_path: Path):
    """Image 1 of the training images is damaged, and image 0 of the test images."""
    image = png(make_image(1))
    for split, contents in (("train", [image, b"?", image, image]), ("valid", [b"?", image])):
        numbers = [10.0 * place for place in range(len(contents))]
        table = pa.table({"image": [{"bytes": content} for content in contents], "x": numbers})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    data = settings_of("tiny_imagenet", path=str(tmp_path), label=None)
    assert "no labeled training images" in str(evaluation_problem(data))
    assert evaluation_problem(data, needs_labels=False) is None
    subject = make_evaluation_input(None, data, device=torch.device("cpu"), needs_labels=False)
    result = read_targets(subject, columns=["x"], file=None, convert=as_numbers)
    assert (result.train[:, 0].tolist(), result.test[:, 0].tolist()) == ([0, 20, 30], [10])
    some = read_targets(subject.subset(torch.tensor([0])), columns=["x"], file=None, convert=as_numbers)
    assert some.test.tolist() == [[10]]
    with pytest.raises(InputError, match="has no column 'y'"):
        read_targets(subject, columns=["y"], file=None, convert=as_numbers)
    with pytest.raises(InputError, match=r"evaluation.columns=null names no targets; set evaluation.columns"):
        read_targets(subject, columns=None, file=None, convert=as_numbers)


def test_bars_of_unused_images_make_names_too(tmp_path: Path):
    """A limit leaves images with one name each; a column of texts without bars has no targets."""
    images_in_folders(tmp_path, "train/a.png", "train/b.png", "test/a.png")
    data = settings_of("folder", path=str(tmp_path), size=4, label=None, folders="none")
    subject = make_evaluation_input(None, data, device=torch.device("cpu"), needs_labels=False)
    text = "file,tags,patient\ntrain/a.png,cat,p1\ntrain/b.png,dog,p2\ntest/a.png,dog,p3\n"
    (tmp_path / "t.csv").write_text(f"{text}other.png,cat|dog,p4\n")
    result = read_targets(subject, columns=["tags"], file=str(tmp_path / "t.csv"), convert=as_labels)
    assert (result.train.tolist(), result.test.tolist(), result.names) == ([[1, 0], [0, 1]], [[0, 1]], ("cat", "dog"))
    with pytest.raises(InputError, match="value 'p1', but labels are 0, 1, and blank for unknown, or names .*; name"):
        read_targets(subject, columns=None, file=str(tmp_path / "t.csv"), convert=as_labels)
    images_in_folders(tmp_path, "test/c.png")
    rows = ["train/a.png,cat,train", "train/b.png,dog,train", "test/a.png,dog,test", "test/c.png,cat|dog,test"]
    (tmp_path / "list.csv").write_text("\n".join(["path,tags,split", *rows]))
    data = settings_of("folder", path=str(tmp_path / "list.csv"), size=4, label=None)
    listed = make_evaluation_input(None, data, device=torch.device("cpu"), needs_labels=False)
    some = read_targets(listed.subset(torch.tensor([0])), columns=["tags"], file=None, convert=as_labels)
    assert (some.train.tolist(), some.test.tolist(), some.names) == ([[1, 0], [0, 1]], [[0, 1]], ("cat", "dog"))


def test_columns_may_have_the_same_classes(tmp_path: Path):
    names = [f"{folder}/{name}.png" for folder in ("train", "test") for name in "ab"]
    images_in_folders(tmp_path, *names)
    rows = "".join(
        f"{name},{cells}\n" for name, cells in zip(names, ("x|,y|z", "y|,x|", "y|,x|", "x|,y|"), strict=True)
    )
    (tmp_path / "t.csv").write_text(f"file,left,right\n{rows}")
    data = settings_of("folder", path=str(tmp_path), size=4, label=None, folders="none")
    subject = make_evaluation_input(None, data, device=torch.device("cpu"), needs_labels=False)
    result = read_targets(subject, columns=None, file=str(tmp_path / "t.csv"), convert=as_labels)
    assert result.names == ("left: x", "left: y", "right: x", "right: y", "z")
    assert result.train.tolist() == [[1, 0, 0, 1, 1], [0, 1, 1, 0, 0]]
