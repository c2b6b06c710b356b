"""Splits of local parquet and arrow files, by their names."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedssl.datasets.base import forget_images, load_split
from fedssl.datasets.sources import find
from fedssl.datasets.split_files import split_files
from fedssl.errors import InputError
from tests.fedssl.datasets.made import first_pixels, make_image, png, query_of, settings_of, table, touch

pytestmark = pytest.mark.usefixtures("log_again")


def found(root: Path | str, split: str) -> list[str]:
    return [file.name for file in split_files(find(str(root)), query_of(split))[0]]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("training.parquet", "testing.parquet"),
        ("Train.PARQUET", "Eval.parquet"),
        ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
        ("train/0000.parquet", "test/0001.parquet"),
        ("cifar10-train.arrow", "cifar10-test.arrow"),
        ("a.train.parquet", "a.val.parquet"),
    ],
)
def test_files_and_folders_named_after_splits(tmp_path: Path, train: str, test: str) -> None:
    root = touch(tmp_path, train, test, "README.md", "._train.parquet", ".ipynb_checkpoints/train.parquet")
    assert (found(root, "train"), found(root, "test")) == ([Path(train).name], [Path(test).name])
    assert found(root / ("**/*.*" if "/" in train else "*.*"), "test") == [Path(test).name]
    assert not split_files(find(str(root)), query_of("train", test_fraction=0.2))[1]


def test_folders_with_the_same_shards_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the configurations of a data set in a copy of its repository."""
    shards = [f"train-0000{number}-of-00002.parquet" for number in range(2)]
    root = touch(tmp_path, *(f"{name}/{shard}" for name in ("plain", "small") for shard in shards))
    assert found(root, "train") == shards * 2
    assert f"/small are read as one data set; if these are several, set dataset.path={root / 'plain'}" in caplog.text
    caplog.clear()
    assert found(root / "plain", "train") == shards
    assert "one data set" not in caplog.text


@pytest.mark.parametrize("in_column", [False, True])
def test_a_test_without_labels_is_replaced(tmp_path: Path, in_column: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As on the Hub, where labels of tests are hidden."""
    parts = {
        name: table(values, labels, image="image")
        for name, values, labels in (("train", [1, 2], [0, 1]), ("validation", [3, 4], [1, 0]), ("test", [5], [-1]))
    }
    if in_column:
        columns = [part.append_column("split", pa.array([name] * len(part))) for name, part in parts.items()]
        parts = {"all": pa.concat_tables(columns)}
    for name, part in parts.items():
        pq.write_table(part, tmp_path / f"{name}.parquet")
    settings = settings_of("folder", path=str(tmp_path), size=4, cache=None)
    test = load_split(settings, "test")
    assert (first_pixels(test.images), test.labels.tolist()) == ([3, 4], [1, 0])
    assert "the validation serves as the test, which has no labels" in caplog.text
    unlabeled = settings_of("folder", path=str(tmp_path), size=4, cache=None, label=None)
    assert first_pixels(load_split(unlabeled, "test").images) == [5]


def test_a_split_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    mine = touch(tmp_path / "a", "mine.parquet")
    assert (found(mine, "train"), found(mine, "test")) == (["mine.parquet"], [])
    assert split_files(find(str(mine)), query_of("test", test_fraction=0.2)) == ([mine / "mine.parquet"], True)
    named = touch(tmp_path / "b", "a_tr.parquet", "a_val.parquet")
    assert (found(named, "a_tr"), found(named, "val")) == (["a_tr.parquet"], ["a_val.parquet"])
    for root, split, message in (
        (mine, "val", r"no split 'val', only mine\.parquet; hold out .*dataset\.splits\.test=null"),
        (mine, "tset", "no split 'tset'"),
        (named, "train", r"no split 'train', only a_tr\.parquet, a_val\.parquet; set dataset\.splits\.federated and "),
        (named, "tset", "no split 'tset'"),
    ):
        with pytest.raises(InputError, match=message):
            found(root, split)


def lists(root: Path, **texts: str) -> Path:
    """Write lists of the images 0.png to 9.png, whose first pixels are 10 times their numbers."""
    for number in range(10):
        (root / f"{number}.png").write_bytes(png(make_image(10 * number)))
    for name, text in texts.items():
        (root / f"{name}.csv").write_text(text)
    forget_images()
    return root


def pixels(path: str, split: str = "train", *, name: str = "folder", **changes: object) -> list[int]:
    settings = settings_of(name, path=path, **{"size": 4, "cache": None, "test_fraction": 0.0} | changes)
    return first_pixels(load_split(settings, split).images)


def test_all_tables_need_the_column_of_the_splits(tmp_path: Path) -> None:
    split, plain = "path,label,split\n1.png,a,train\n2.png,b,test\n", "path,label\n3.png,a\n"
    root = lists(tmp_path, a=split, b=plain, empty="path,label\n", train=split, test=plain)
    with pytest.raises(InputError, match=r"b\.csv has no column split with the split, .* dataset\.split_column=null"):
        pixels(f"{root}/{{a,b}}.csv")
    assert pixels(f"{root}/{{a,b}}.csv", split_column=None) == [10, 20, 30]
    assert pixels(f"{root}/{{a,empty}}.csv") == [10]
    named = f"{root}/{{train,test}}.csv"  # whose names are splits
    assert (pixels(named), pixels(named, "test")) == ([10, 20], [30])


def test_lists_of_other_data_sets_are_read_alike(tmp_path: Path) -> None:
    text = "path,label,split\n1.png,0,train\n2.png,1,test\n"
    root = lists(tmp_path, known=text, more=f"{text}gone.png,0,train\n")
    own: dict[str, object] = {"image": "path", "splits": {"test": "test"}}
    for name in ("cifar10", "tiny_imagenet"):
        assert pixels(f"{root}/known.csv", name=name, **own) == [10]
        assert pixels(f"{root}/known.csv", "test", name=name, **own) == [20]
    with pytest.raises(InputError, match=r"do not exist, such as .*gone\.png.* dataset\.skip_missing=true"):
        pixels(f"{root}/more.csv", name="cifar10", **own)
