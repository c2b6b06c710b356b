"""CSV files that name images, with labels, groups and splits."""

import codecs
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedssl.datasets import base
from fedssl.datasets.base import ImageData, load_federated, load_split
from fedssl.datasets.path_index import files_digest, index_all
from fedssl.errors import InputError
from tests.fedssl.datasets.made import first_pixels, make_image, png, settings_of

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Files 0.png to 9.png in a folder with a space, whose first pixels are 10 times their numbers."""
    (tmp_path / "my images").mkdir()
    for number in range(10):
        (tmp_path / "my images" / f"{number}.png").write_bytes(png(make_image(10 * number)))
    return tmp_path


def read(folder: Path, text: str | bytes, split: str = "train", **changes: object) -> ImageData | None:
    (folder / "list.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    base.forget_images()
    settings = {"path": str(folder / "list.csv"), "size": 4, "cache": None, "test_fraction": 0.0}
    return load_split(settings_of("folder", **settings | changes), split)


@pytest.mark.parametrize(
    "text",
    [
        "path,label\nmy images/1.png,cat\nmy images/2.png,dog\n",
        codecs.BOM_UTF8 + b"path,label\r\n\r\nmy images/1.png,cat\r\n\r\nmy images/2.png,dog\r\n\r\n",
        'label;path;note\ncat;"my images/1.png";"a;b"\ndog; my images/2.png ;\n',
        "path\tlabel\nmy images\\1.png\tcat\nmy images\\2.png\tdog",
        'path , label\n"my images/1.png",cat\n./my images/../my images/2.png,dog\n',
        "path,label\nmy images/1.png,cat\nmy images/2.png,dog\n".encode("utf-16"),
        'sep=;\r\n"a, b, c";label;Bilddatei\r\n1;cat;my images/1.png\r\n2;dog;my images/2.png\r\n',
        "mask|label|image_path\n1|cat|my images/1.png\n2|dog|my images/2.png\n",
        "path;label;;\r\nmy images/1.png;cat;;\r\n;;;\r\nmy images/2.png;dog;;\r\n;;;",
    ],
    ids=["plain", "windows", "semicolons", "backslashes", "spaces", "utf-16", "excel", "bars", "empty cells"],
)
def test_files_as_people_write_them(images: Path, text: str | bytes) -> None:
    data = read(images, text)
    assert first_pixels(data.images) == [10, 20]
    assert (data.classes, data.labels.tolist()) == (("cat", "dog"), [0, 1])


def test_a_relative_table_has_a_folder_with_a_name(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(images)
    rows = f"path\n{images.name}/my images/3.png\n/absent/4.png\n\\absent\\5.png\n"
    assert first_pixels(read(images, rows, path="list.csv", skip_missing=True).images) == [30]


def test_a_list_of_another_kind_is_refused(images: Path) -> None:
    (images / "list.txt").write_text("my images/1.png 0")
    with pytest.raises(
        InputError, match=r"\(ignored 1 file: 1 \.txt\).*; a list of images is a CSV file with the columns"
    ):
        read(images, "", path=str(images / "list.txt"))


@pytest.mark.parametrize("slash", ["/", "\\"])
def test_names_may_begin_with_the_folder_of_the_table(images: Path, slash: str) -> None:
    rows = "\n".join(slash.join((images.name, "my images", f"{number}.png")) for number in (3, 4))
    assert first_pixels(read(images, f"Path\n{rows}\n").images) == [30, 40]
    (images / images.name / "my images").mkdir(parents=True)
    (images / images.name / "my images" / "3.png").write_bytes(png(make_image(200)))
    assert first_pixels(read(images, f"Path\n{rows}\n").images) == [200, 40]
    with pytest.raises(InputError, match="1 of the 1 image files"):
        read(images, f"Path\n{images.name}s{slash}my images{slash}3.png\n")


def test_names_without_ending_may_be_numbers(images: Path) -> None:
    for file in (images / "my images").iterdir():
        file.rename(images / file.name)
    for column in ("image", "id"):
        data = read(images, f"{column},label\n1,cat\n0,dog\n,cat\n", image=column, skip_missing=True)
        assert (first_pixels(data.images), data.labels.tolist()) == ([10, 0], [0, 1])
    assert first_pixels(read(images, "image,label\n2,cat\n").images) == [20]
    (images / "list.jsonl").write_text('{"id": 1, "label": "cat"}\n{"id": 0, "label": "dog"}')
    assert first_pixels(read(images, "", path=str(images / "list.jsonl"), image="id").images) == [10, 0]


def test_lines_of_json_as_datasets_reads_them(images: Path) -> None:
    lines = ['{"file_name": "my images/1.png", "label": "cat"}', '{"file_name": "my images/2.png", "label": "dog"}']
    lines[0] = lines[0].replace("{", '{"outline": "' + 2**20 * "x" + '", ')  # longer than a block of pyarrow
    (images / "metadata.jsonl").write_text("\n".join(lines))
    data = load_federated(settings_of("folder", path=str(images / "metadata.jsonl"), size=4, cache=None))
    assert (first_pixels(data.images), data.labels.tolist(), data.classes) == ([10, 20], [0, 1], ("cat", "dog"))
    data = load_federated(settings_of("folder", path=str(images), size=4, cache=None))
    (warning,) = [line for line in data.warnings if "1 file ending in .jsonl is ignored" in line]
    path = warning.partition("'dataset.path=")[2].removesuffix("'")
    assert load_federated(settings_of("folder", path=path, size=4, cache=None)).classes == ("cat", "dog")


def test_labels_are_numbers_names_or_missing(images: Path, log_again: None, caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"my images/{number}.png" for number in range(4)]
    for written, labels, classes in (
        (["3", "0", "1", "0"], [3, 0, 1, 0], ()),
        (["3.0", "", "1.0", "nan"], [3, -1, 1, -1], ()),
        (["b", "", "a", "NaN"], [1, -1, 0, -1], ("a", "b")),
        (["10", "", "02", "1"], [2, -1, 0, 1], ("02", "1", "10")),  # not the number 2
        (["1E2", "", "2E1", "100"], [1, -1, 2, 0], ("100", "1E2", "2E1")),  # not the number 100
        (["1e+00", "", "0.0", "2"], [1, -1, 0, 2], ()),
        (["", "", "", ""], None, ()),
    ):
        rows = [f"{line},{label}" for line, label in zip(lines, written, strict=True)]
        data = read(images, "\n".join(["path,label", *rows]))
        assert (data.labels if data.labels is None else data.labels.tolist(), data.classes) == (labels, classes)
    assert "list.csv: label: 1 values NaN are read as missing; write names differently" in caplog.text
    assert read(images, "path\n" + "\n".join(lines)).labels is None


@pytest.mark.parametrize("names", [("1234567890123456789012", "1234567890123456789013"), ("1e3", "1000"), ("01", "1")])
def test_numbers_of_different_owners_stay_apart(images: Path, names: tuple[str, str]) -> None:
    rows = "".join(f"my images/{number}.png,{names[number % 2]}\n" for number in range(4))
    data = read(images, f"path,who\n{rows}", owner="who", group="who", label=None)
    assert [data.owner_names[owner] for owner in data.owners] == [*names, *names]
    assert len(data.groups.unique()) == 2


def test_names_without_an_ending_are_completed(images: Path) -> None:
    (images / "my images" / "2.txt").touch()
    text = "path,label\nmy images/1,a\nmy images/2,b\n"
    assert first_pixels(read(images, text).images) == [10, 20]
    (images / "my images" / "2.tif").touch()
    message = r"1 of the 2 image files that .* do not exist, such as .*my images/2; correct"
    with pytest.raises(InputError, match=message):
        read(images, text)


def test_dates_and_times_are_names(images: Path) -> None:
    days = ["2024-01-05", "2023-12-01", "2024-01-05"]
    text = "".join(f"my images/{number}.png,{day},1{number % 2}:30\n" for number, day in enumerate(days))
    data = read(images, f"path,label,group\n{text}my images/3.png,NaN,11:30\n", group="group")
    assert (data.classes, data.labels.tolist()) == (("2023-12-01", "2024-01-05"), [1, 0, 1, -1])
    assert data.groups.tolist() == [0, 1, 0, 1]
    lines = [f'{{"path": "my images/{number}.png", "label": "{day}"}}' for number, day in enumerate(days)]
    (images / "list.jsonl").write_text("\n".join(lines))
    assert read(images, "", path=str(images / "list.jsonl")).labels.tolist() == [1, 0, 1]


def test_missing_files_are_counted_and_may_be_skipped(images: Path) -> None:
    text = "path,label\nmy images/1.png,a\ngone/2.png,b\n,a\nmy images/3.png,b\n"
    message = r"^2 of the 4 image files that .*list\.csv names do not exist, such as .*gone/2\.png.*; correct the paths"
    with pytest.raises(InputError, match=message) as caught:
        read(images, text)
    setting, value = str(caught.value).partition("dataset.")[2].split("=")
    data = read(images, text, **{setting: value == "true"})
    assert (first_pixels(data.images), data.labels.tolist()) == ([10, 30], [0, 1])
    assert any("do not exist" in warning and "the others are used" in warning for warning in data.warnings)
    with pytest.raises(InputError, match=r"1 .* such as C:/gone.png; .* or move the table to its images$"):
        read(images, "path,label\nC:\\gone.png,a\n", skip_missing=True)
    assert first_pixels(read(images, "where,label\n,a\nmy images/1.png,b\n", skip_missing=True).images) == [10]
    (images / "list.csv").rename(images / "my images" / "list.csv")
    assert first_pixels(read(images / "my images", "path,label\n1.png,a\n").images) == [10]


@pytest.mark.parametrize("names", [("1.png", "11.png", "2.png"), ("1", "11", "2")])
def test_names_alone_are_found_in_subfolders(images: Path, names: tuple[str, ...], caplog) -> None:
    """As the lists of ChestX-ray14 and of Kaggle, whose images are in several folders beside the list."""
    caplog.set_level("INFO")
    (images / "part_2" / "images").mkdir(parents=True)
    (images / "part_2" / "images" / "11.png").write_bytes(png(make_image(110)))
    (images / "2.png").write_bytes(png(make_image(25)))  # beside the list, hence not searched
    data = read(
        images, "image,label\n" + "".join(f"{name},{label}\n" for name, label in zip(names, "aba", strict=True))
    )
    assert (first_pixels(data.images), data.labels.tolist()) == ([10, 110, 25], [0, 1, 0])
    assert f"{images}: 2 of 3 images are in my images, part_2/images" in caplog.text


def test_names_of_several_images_are_refused(images: Path, log_again: None, caplog: pytest.LogCaptureFixture) -> None:
    """The mask 1.png is taken for no image, also if the image 2.png is gone."""
    (images / "masks").mkdir()
    for name in ("1.png", "2.png"):
        (images / "masks" / name).write_bytes(png(make_image(0)))
    (images / "my images" / "2.png").unlink()
    text = "path,label\n1.png,a\n2.png,b\n3.png,b\n"
    with pytest.raises(InputError, match=r"3 of the 3 image files that .* do not exist, such as .*1\.png"):
        read(images, text)
    assert f"1 names are those of several images below {images}, such as " in caplog.text
    paths = text.replace("1.png", "my images/1.png").replace("2.png", "my images/4.png")
    assert first_pixels(read(images, paths).images) == [10, 40, 30]


def test_repeated_files_are_used_once(images: Path) -> None:
    """As in lists of boxes, which have a line per object."""
    rows = "my images/1.png,a\nmy images/2.png,b\nmy images/../my images/1.png,b\ngone/../my images/2.png,a\n"
    data = read(images, f"path,label\ngone/../my images/1.png,b\n{rows}", skip_missing=True)
    assert (first_pixels(data.images), data.labels.tolist()) == ([10, 20], [0, 1])
    warning = data.warnings[-1]
    assert "names 1 image files again, such as" in warning
    assert "1 of them with another label" in warning


def test_of_repeated_files_the_first_label_is_used(images: Path) -> None:
    """A label may be missing where a file is named first."""
    rows = "my images/1.png,\nmy images/2.png,b\nmy images/1.png,a\nmy images/2.png,\nmy images/1.png,a\n"
    data = read(images, f"path,label\n{rows}")
    assert (first_pixels(data.images), data.labels.tolist()) == ([20, 10], [1, 0])
    (warning,) = [line for line in data.warnings if "image files again" in line]
    assert warning.endswith("my images/1.png: the first row with a label is used")


def test_a_column_has_the_splits(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    text = "path,label,split\n" + "".join(
        f"my images/{number}.png,{number % 2},{split}\n" for number, split in enumerate(["train"] * 6 + ["valid"] * 4)
    )
    train, test = read(images, text), read(images, text, "test")
    assert (first_pixels(train.images), first_pixels(test.images)) == ([0, 10, 20, 30, 40, 50], [60, 70, 80, 90])
    assert "splits in the column split: train (6), valid (4)" in caplog.text
    assert len(read(images, text, split_column=None).images) == 10
    with pytest.raises(InputError, match=r"the column split has no split 'train', only a, b; .*split_column=null"):
        read(images, "path,split\nmy images/1.png,a\nmy images/2.png,b\n")
    assert load_federated(settings_of("folder", path=str(images / "list.csv"), split_column=None)).labels is None


@pytest.mark.parametrize("name", ["é" * 300, "\\" + "e" * 300, "a" * 300])
def test_names_may_be_longer_than_files(images: Path, name: str) -> None:
    text = f"path,label\nmy images/1.png,x\n{name},y\n"
    assert first_pixels(read(images, text, skip_missing=True).images) == [10]


def test_files_of_the_training_in_the_test_are_a_warning(images: Path) -> None:
    (images / "train.csv").write_text("path,label\nmy images/1.png,a\nmy images/2.png,b\n")
    (images / "test.csv").write_text("path,label\nmy images/../my images/2.png,b\nmy images/3.png,a\n")
    settings = settings_of("folder", path=str(images / "*.csv"), size=4, cache=None)
    (warning,) = load_split(settings, "test").warnings
    assert "1 files are in the training and in test (" in warning
    assert "2.png), so that results are too good" in warning
    assert load_split(settings, "train").warnings == ()


def test_a_list_without_a_test_may_hold_out_a_domain(images: Path) -> None:
    text = "path,label,hospital\n" + "".join(f"my images/{n}.png,{n % 2},h{n // 4}\n" for n in range(10))
    assert read(images, text, "test") is None
    changes = {"owner": "hospital", "held_out": "h2"}
    train, test = (read(images, text, split, **changes) for split in ("train", "test"))
    assert (first_pixels(train.images), first_pixels(test.images)) == (list(range(0, 80, 10)), [80, 90])


def test_no_group_is_on_both_sides(images: Path) -> None:
    """Ten images of five patients, each with an image of both classes: the share 0.4 of each class are two patients."""
    text = "path,label,patient\n" + "".join(f"my images/{n}.png,{n % 2},p{n // 2}\n" for n in range(10))
    train, test = (read(images, text, split, group="patient", test_fraction=0.4) for split in ("train", "test"))
    assert sorted(first_pixels(train.images) + first_pixels(test.images)) == list(range(0, 100, 10))
    patients = [{pixel // 20 for pixel in first_pixels(data.images)} for data in (train, test)]
    assert patients[0].isdisjoint(patients[1])
    assert np.bincount(test.labels).tolist() == [2, 2]
    assert train.groups.dtype.is_floating_point is False
    assert len(train.groups.unique()) == 3


@pytest.mark.parametrize("header", ["Path,Label,Group,Split", "PATH,LABEL,GROUP,SPLIT", "path , Label,Group ,split"])
def test_the_case_of_columns_does_not_matter(images: Path, header: str) -> None:
    rows = "".join(f"my images/{n}.png,{'ab'[n % 2]},p{n // 2},{('train', 'test')[n > 5]}\n" for n in range(10))
    for split in ("train", "test"):
        data, expected = (
            read(images, f"{first}\n{rows}", split, group="group") for first in (header, "path,label,group,split")
        )
        assert first_pixels(data.images) == first_pixels(expected.images)
        assert (data.classes, data.labels.tolist()) == (expected.classes, expected.labels.tolist())
        assert data.groups.tolist() == expected.groups.tolist()


def test_columns_that_differ_only_in_case_are_named(images: Path) -> None:
    rows = "".join(f"my images/{n}.png,{'ab'[n % 2]},{'cd'[n // 5]}\n" for n in range(10))
    assert read(images, f"path,Label,label\n{rows}").classes == ("c", "d")
    assert read(images, f"path,Label,label\n{rows}", label="Label").classes == ("a", "b")
    assert not read(images, f"path,Label,LABEL\n{rows}").classes  # with a warning


def test_groups_that_are_classes_are_not_held_out(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "path,label\n" + "".join(f"my images/{n}.png,{n % 2}\n" for n in range(10))
    changes = {"group": "label", "test_fraction": 0.4}
    assert read(images, text, "test", **changes) is None
    assert len(read(images, text, **changes).images) == 10
    assert [record.levelname for record in caplog.records if "no group was held out" in record.message] == ["WARNING"]
    assert "0 images" not in caplog.text


def test_groups_of_given_splits_are_compared(images: Path) -> None:
    text = "path,split,patient\n" + "".join(
        f"my images/{number}.png,{'train' if number < 6 else 'test'},{number % 5}\n" for number in range(10)
    )
    warnings = read(images, text, "test", group="patient").warnings
    assert any("4 groups have images in the training and in test (1, 2, 3, 4)" in warning for warning in warnings)
    with pytest.raises(InputError, match=r"no column 'who' .*dataset\.group=null"):
        read(images, text, group="who")
    for patients in (("p", ""), ("", "7"), ("", "007")):
        rows = "".join(f"my images/{number}.png,{patient}\n" for number, patient in enumerate(patients))
        message = r"dataset\.group=patient has no value in 1 of 2 .*give every image a group"
        with pytest.raises(InputError, match=message):
            read(images, f"path,patient\n{rows}", group="patient")


def test_a_parquet_file_of_paths(images: Path) -> None:
    paths = [f"my images/{number}.png" for number in (4, 2)]
    pq.write_table(pa.table({"file_name": paths, "label": ["a", "b"]}), images / "train.parquet")
    for kept in ({"cache": None}, {"storage": "encoded"}):
        data = load_federated(settings_of("folder", path=str(images / "train.parquet"), size=4, **kept))
        assert first_pixels(data.images) == [40, 20]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"list\.csv cannot be read"),
        ("a,b\n1,2\n", r"no column of images in \['a', 'b'\]; set dataset\.image=COLUMN"),
        ("path,label\nmy images/1.png,a,b\n", r"list\.csv cannot be read .*3"),
        ("my images/1.png,cat\nmy images/2.png,cat\n", r"its first line has the file my images/1\.png; write names of"),
        ("path,path\na,b\n", r"two of its columns path, path have the same name"),
    ],
)
def test_unusable_files_are_one_sentence(images: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(images, text)
    assert "\n" not in str(caught.value)


def test_a_device_notices_that_a_named_file_has_changed(images: Path) -> None:
    (images / "list.csv").write_text("path\nmy images/1.png\nmy images/2.png\ngone.png\n")
    assert index_all(images / "list.csv").count == 2
    before = files_digest(images / "list.csv")
    (images / "my images" / "3.png").write_bytes(b"not named")
    assert files_digest(images / "list.csv") == before
    (images / "my images" / "1.png").write_bytes(png(make_image(99, size=(5, 5))))
    assert files_digest(images / "list.csv") != before


@pytest.mark.parametrize(("written", "stored"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_whose_accents_are_written_apart(images: Path, written: str, stored: str) -> None:
    """macOS stores the letters and accents of names one by one, and spreadsheets write them as one."""
    folder = images / unicodedata.normalize(written, "Zürich")
    folder.mkdir()
    (folder / unicodedata.normalize(stored, "é.png")).write_bytes(png(make_image(5)))
    text = unicodedata.normalize(written, "path,label\nZürich/é.png,a\nmy images/1.png,b\n")
    assert first_pixels(read(images, text).images) == [5, 10]
