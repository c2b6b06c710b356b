"""Data sets from files that the tests write themselves; nothing is fetched."""

import inspect
import io
import json
import logging
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from fedssl import partition
from fedssl.config import compose, read_data
from fedssl.datasets import base, decoding, digits
from fedssl.datasets.base import check, choose, hold_out, load
from fedssl.errors import InputError
from fedssl.settings import DataSettings

CONF = Path(__file__).parents[3] / "conf" / "dataset"
NAMES = ["digits", "cifar10", "cifar100", "tiny_imagenet", "stl10", "image_folder"]


@pytest.fixture(autouse=True)
def no_network_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    base._read.cache_clear()


def node_of(name: str, **changes: object) -> DictConfig:
    settings = OmegaConf.load(CONF / f"{name}.yaml")
    settings.pop("defaults", None)  # Hydra's own key
    return OmegaConf.merge(settings, changes)


def settings_of(name: str, **changes: object) -> DataSettings:
    return read_data(node_of(name, **changes))


def picture(value: int, *, size: tuple[int, int] = (4, 4), mode: str = "RGB") -> Image.Image:
    """A picture whose pixels are ``value``, ``value + 1``, ... in every channel."""
    pixels = np.arange(value, value + size[0] * size[1], dtype=np.uint8).reshape(size[1], size[0])
    return Image.fromarray(pixels).convert(mode)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def table(values: list[int], labels: list[int | None], *, image: str = "img", label: str = "label") -> pa.Table:
    """A table as the Hub stores one: a picture is a struct of bytes and path, the class names are in the metadata."""
    pictures = [{"bytes": png(picture(value)), "path": None} for value in values]
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    features = {image: {"_type": "Image"}, label: {"names": ["ant", "bee", "cow"], "_type": "ClassLabel"}}
    columns = {image: pa.array(pictures, struct), label: pa.array(labels, pa.int64())}
    return pa.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def first_pixels(images: torch.Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_yaml_has_the_static_keys_and_the_reader_takes_the_others(name: str) -> None:
    settings = settings_of(name)
    check(settings)
    assert settings.num_classes is None or settings.num_classes > 1
    assert set(node_of(name).splits) == {"federated", "train", "test"}
    own = set(settings.reader.values) - {"_target_"}
    assert own | {"split", "limit"} == set(inspect.signature(get_method(settings.reader.target)).parameters)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": 4}, r"dataset\.channels=4 gives wrong channels; allowed are 1 \(grey\) and 3 \(RGB\)"),
        ({"channels": 1}, r"dataset\.channels=1; .* dataset\.mean=\[0\.473\] dataset\.std=\[0\.251\]"),
        ({"std": [1.0, 0.0, 1.0]}, r"dataset\.std=.* must be above 0"),
        ({"size": 0}, r"dataset\.size=0"),
        ({"limit": 0}, r"dataset\.limit=0 must be a whole number of pictures, at least 1"),
        ({"test_limit": -1}, r"dataset\.test_limit=-1"),
    ],
)
def test_contradicting_settings_are_refused(changes: dict, message: str) -> None:
    # The means of CIFAR-10's channels 0.4914, 0.4822, 0.4465 are 0.4734 on average, 0.2470, 0.2435, 0.2616 are 0.2507.
    with pytest.raises(InputError, match=message):
        check(settings_of("cifar10", **changes))


def test_choose_is_fixed_sorted_and_without_repetition() -> None:
    assert choose(5, None).tolist() == choose(5, 9).tolist() == [0, 1, 2, 3, 4]
    some = choose(1000, 100)
    assert np.array_equal(some, choose(1000, 100))
    assert (np.diff(some) > 0).all()
    assert abs(some.mean() - 500) < 100  # from everywhere: the mean of 100 draws has standard deviation 27


def test_hold_out_by_hand() -> None:
    # A quarter of 5, 3 and 2 pictures is 1.25, 0.75 and 0.5: the floors are 1, 0, 0, and as round(10 / 4) = 2 the class
    # with the largest remainder, the second, gives one more.
    labels = np.array([0] * 5 + [1] * 3 + [2] * 2)
    train, test = hold_out(labels, fraction=0.25)
    assert np.bincount(labels[test], minlength=3).tolist() == [1, 1, 0]
    assert sorted([*train, *test]) == list(range(10))
    assert np.array_equal(test, hold_out(labels, fraction=0.25)[1])
    everything, nothing = hold_out(labels, fraction=0)
    assert everything.tolist() == list(range(10))
    assert nothing.tolist() == []


# --- digits ---------------------------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    original = load_digits()
    train, test = (load(settings_of("digits"), split) for split in ("train", "test"))
    assert train is load(settings_of("digits"), "federated")
    assert train.images.shape == (1438, 1, 8, 8)
    assert test.images.shape == (359, 1, 8, 8)
    assert train.images.dtype == torch.uint8
    assert train.labels.dtype == torch.int64
    kept, held_out = hold_out(original.target, fraction=0.2)
    for pictures, rows in ((train, kept), (test, held_out)):
        assert torch.equal(pictures.images[:, 0], torch.from_numpy(np.rint(original.images[rows] * 255 / 16)).byte())
        assert torch.equal(pictures.labels, torch.from_numpy(original.target[rows]))
        assert pictures.classes == tuple("0123456789")
    # Class sizes 178 182 177 183 181 182 181 179 174 180; a fifth is 35.6 36.4 35.4 36.6 36.2 36.4 36.2 35.8 34.8 36.0:
    # the floors give 355, and the four largest remainders (7, 8, 0, 3) one more each.
    assert torch.bincount(test.labels).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]


def test_digits_without_the_file_come_from_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(settings_of("digits"), "test")
    base._read.cache_clear()
    monkeypatch.setattr(digits, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=["/nowhere"]))
    pictures = load(settings_of("digits"), "test")
    assert torch.equal(pictures.images, expected.images)
    assert torch.equal(pictures.labels, expected.labels)


def test_digits_statistics_are_those_of_the_yaml() -> None:
    settings = settings_of("digits")
    values = load(settings, "train").images / 255
    assert values.mean().item() == pytest.approx(settings.mean[0], abs=1e-3)
    assert values.std().item() == pytest.approx(settings.std[0], abs=1e-3)


def test_digits_in_another_form() -> None:
    settings = settings_of("digits", channels=3, size=16, mean=[0.3] * 3, std=[0.4] * 3, limit=50, test_limit=7)
    wide = load(settings, "train")
    assert wide.images.shape == (50, 3, 16, 16)
    assert torch.equal(wide.images[:, 0], wide.images[:, 2])
    assert len(load(settings, "test").images) == 7


# --- decoding -------------------------------------------------------------------------------------------------------


def test_channels_are_converted() -> None:
    red = Image.new("RGB", (2, 2), (200, 100, 50))
    # ITU-R 601: 0.299 * 200 + 0.587 * 100 + 0.114 * 50 = 124.2
    assert (decoding.to_array(red, channels=1, size=2) == 124).all()
    assert decoding.to_array(red, channels=3, size=2)[:, 0, 0].tolist() == [200, 100, 50]
    assert decoding.to_array(picture(7, mode="L"), channels=3, size=4)[:, 0, 1].tolist() == [8, 8, 8]
    assert decoding.to_array(red.convert("RGBA"), channels=3, size=2)[:, 1, 1].tolist() == [200, 100, 50]
    assert decoding.to_array(red.convert("P"), channels=3, size=2).shape == (3, 2, 2)
    sixteen = Image.fromarray(np.array([[0, 255], [256, 65535]], dtype=np.uint16))
    assert decoding.to_array(sixteen, channels=1, size=2).tolist() == [[[0, 0], [1, 255]]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_impossible_channels_are_named(mode: str) -> None:
    with pytest.raises(InputError, match=f"wrong channels: .*mode {mode}"):
        decoding.to_array(Image.new(mode, (4, 4)), channels=1, size=4)


def test_another_size_scales_the_shorter_side_and_crops_the_centre() -> None:
    three = np.repeat(np.array([[10, 20, 30]], dtype=np.uint8), 4, axis=0).repeat(4, axis=1)  # 4 high, 12 wide
    assert (decoding.to_array(Image.fromarray(three), channels=1, size=4) == 20).all()
    assert (decoding.to_array(Image.fromarray(three.T.copy()), channels=1, size=4) == 20).all()
    # Half the size: the filter reaches one pixel over the edge of the crop.
    assert np.abs(decoding.to_array(Image.fromarray(three), channels=1, size=2).astype(int) - 20).max() <= 2
    assert decoding.to_array(Image.fromarray(three), channels=3, size=9).shape == (3, 9, 9)


def test_exif_orientation_is_honoured(tmp_path: Path) -> None:
    stored = Image.fromarray(np.array([[1, 2], [3, 4]], dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # the stored picture must be turned by 90 degrees clockwise
    stored.save(tmp_path / "turned.png", exif=exif)
    assert decoding.read_picture(tmp_path / "turned.png", channels=1, size=2).tolist() == [[[3, 1], [4, 2]]]


def test_large_jpeg_keeps_its_content() -> None:
    ramp = np.tile(np.linspace(0, 255, 1024).astype(np.uint8), (1024, 1))
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "JPEG", quality=95)
    small = decoding.read_picture(file.getvalue(), channels=1, size=16)[0]
    # 16 columns of 64 pixels each: their means rise by 255 / 16 = 16 from 8.
    assert np.abs(small.astype(int) - (8 + 15.94 * np.arange(16))).max() < 3


def test_decode_keeps_order_and_reports_what_it_cannot_read() -> None:
    batches = [[png(picture(value)) for value in range(start, start + 3)] for start in range(0, 60, 3)]
    batches[4][1] = b"not a picture"
    canvas = decoding.in_memory((60, 1, 4, 4))
    unreadable = decoding.decode(lambda start: batches, canvas)
    assert canvas.done == 60
    assert list(unreadable) == [13]
    assert unreadable[13].startswith("it is no picture of JPEG, PNG, ")
    rest = [value for value in range(60) if value != 13]
    assert canvas.leave_out(unreadable).tolist() == rest
    assert first_pixels(canvas.images) == rest


def test_pictures_that_do_not_fit_into_memory_are_refused_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "available_memory", lambda: 8 * 10**9)
    with pytest.raises(InputError, match=r"1,000,000 pictures of 3 x 64 x 64 need 12\.3 GB of memory, and 8\.0 GB are"):
        decoding.in_memory((1_000_000, 3, 64, 64))  # 10^6 * 3 * 64 * 64 = 12.288 * 10^9 bytes


def test_a_picture_that_cannot_be_converted_is_left_out_as_a_damaged_one_is(tmp_path: Path) -> None:
    batches = [[png(picture(1))], [tmp_path / "float.tif"], [png(picture(2))]]
    Image.new("F", (4, 4)).save(tmp_path / "float.tif")
    unreadable = decoding.decode(lambda start: batches, decoding.in_memory((3, 1, 4, 4)))
    assert list(unreadable) == [1]
    assert unreadable[1].startswith("wrong channels: 32-bit values (mode F)")


# --- parquet and arrow ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two training shards, a test shard and a fold that repeats training pictures, under the Hub's names."""
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(table([1, 2, 3], [0, 1, 2]), data / "train-00000-of-00002.parquet")
    pq.write_table(table([4, 5], [0, 1]), data / "train-00001-of-00002-1359597a978bc4fa.parquet")
    pq.write_table(table([1, 2], [0, 1]), data / "train_0-00000-of-00001.parquet")
    pq.write_table(table([9, 8], [2, 1]), data / "test-00000-of-00001.parquet")
    return tmp_path


def test_parquet_folder(folder: Path) -> None:
    settings = settings_of("cifar10", path=str(folder), size=4)
    train = load(settings, "federated")
    assert train is load(settings, "train")
    assert train.images.shape == (5, 3, 4, 4)
    assert first_pixels(train.images) == [1, 2, 3, 4, 5]
    assert train.images[0, 2].flatten().tolist() == list(range(1, 17))
    assert train.labels.tolist() == [0, 1, 2, 0, 1]
    assert train.classes == ("ant", "bee", "cow")
    test = load(settings, "test")
    assert (first_pixels(test.images), test.labels.tolist()) == ([9, 8], [2, 1])


def test_a_limit_decodes_only_its_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[object] = []
    original = decoding.read_picture
    monkeypatch.setattr(
        decoding, "read_picture", lambda source, **form: decoded.append(source) or original(source, **form)
    )
    settings = settings_of("cifar10", path=str(folder), size=4, limit=3, test_limit=1)
    rows = choose(5, 3)
    pictures = load(settings, "federated")
    assert first_pixels(pictures.images) == (rows + 1).tolist()
    assert pictures.labels.tolist() == (rows % 3).tolist()
    assert len(load(settings, "test").images) == 1
    load(settings, "train")
    load(settings_of("cifar10", path=str(folder), size=4, limit=3, test_limit=1), "federated")
    assert len(decoded) == 4  # each split once


def test_single_file_and_pattern(folder: Path) -> None:
    one = settings_of("cifar10", path=str(folder / "data" / "train-00000-of-00002.parquet"), size=4)
    assert first_pixels(load(one, "federated").images) == [1, 2, 3]
    assert load(one, "test") is None
    pattern = settings_of("cifar10", path=str(folder / "data" / "t*-of-00002*.parquet"), size=4)
    assert first_pixels(load(pattern, "federated").images) == [1, 2, 3, 4, 5]


def test_names_that_say_no_split_are_training_pictures(tmp_path: Path) -> None:
    pq.write_table(table([1, 2, 3], [0, 1, 2]), tmp_path / "mine.parquet")
    settings = settings_of("cifar10", path=str(tmp_path), size=4)
    assert first_pixels(load(settings, "federated").images) == [1, 2, 3]
    assert load(settings, "test") is None


def test_splits_as_folders_and_unlabelled_pictures(tmp_path: Path) -> None:
    """The layout of the Hub's conversion; STL-10 marks unlabelled pictures with -1."""
    parts = {"unlabeled": ([1, 2, 3], [-1, -1, -1]), "train": ([4, 5], [0, 1]), "test": ([6], [2])}
    for name, (values, labels) in parts.items():
        (tmp_path / name).mkdir()
        pq.write_table(table(values, labels, image="image"), tmp_path / name / "0000.parquet")
    settings = settings_of("stl10", path=str(tmp_path), size=4)
    shared = load(settings, "federated")
    assert first_pixels(shared.images) == [1, 2, 3]
    assert shared.labels is None
    assert load(settings, "train").labels.tolist() == [0, 1]
    assert load(settings, "test").labels.tolist() == [2]


def test_valid_and_validation_are_the_same_word(tmp_path: Path) -> None:
    pq.write_table(table([1, 2], [0, 1], image="image"), tmp_path / "tiny-imagenet-train-0.parquet")
    pq.write_table(table([3], [1], image="image"), tmp_path / "validation.parquet")
    settings = settings_of("tiny_imagenet", path=str(tmp_path), size=4)
    assert first_pixels(load(settings, "test").images) == [3]
    assert first_pixels(load(settings, "train").images) == [1, 2]


def test_folder_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])})
    splits = {
        name: datasets.Dataset.from_dict({"img": [picture(v) for v in values], "label": labels}, features=features)
        for name, values, labels in (("train", [1, 2, 3], [0, 1, 0]), ("test", [7], [1]))
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    settings = settings_of("cifar10", path=str(tmp_path / "saved"), size=4)
    train, test = load(settings, "federated"), load(settings, "test")
    assert (first_pixels(train.images), train.labels.tolist()) == ([1, 2, 3], [0, 1, 0])
    assert (first_pixels(test.images), test.labels.tolist()) == ([7], [1])
    assert train.classes == ("ant", "bee")


def test_arrow_file_format_and_plain_binary_column(tmp_path: Path) -> None:
    contents = pa.table({"img": pa.array([png(picture(3)), png(picture(4))], pa.binary()), "label": [1, 0]})
    with pa.ipc.new_file(str(tmp_path / "train.arrow"), contents.schema) as writer:
        writer.write_table(contents)
    pictures = load(settings_of("cifar10", path=str(tmp_path), size=4), "federated")
    assert (first_pixels(pictures.images), pictures.labels.tolist(), pictures.classes) == ([3, 4], [1, 0], ())


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_column_names_the_owners(tmp_path: Path, kind: pa.DataType) -> None:
    writers = [["w9", "w10"], ["w9", "w1", "w10"]]
    for number, (values, labels) in enumerate([([1, 2], [0, 1]), ([3, 4, 5], [2, 0, 1])]):
        contents = table(values, labels).append_column("writer_id", pa.array(writers[number]).cast(kind))
        pq.write_table(contents, tmp_path / f"train-{number}.parquet")
    settings = settings_of("cifar10", path=str(tmp_path), size=4, owner="writer_id")
    pictures = load(settings, "federated")
    assert pictures.owner_names == ("w1", "w10", "w9")  # in the order of words
    assert pictures.owners.tolist() == [2, 1, 2, 0, 1]
    assert pictures.owners.dtype == torch.int64
    assert pictures.labels.tolist() == [0, 1, 2, 0, 1]
    limited = load(settings_of("cifar10", path=str(tmp_path), size=4, owner="writer_id", limit=3), "federated")
    assert limited.owners.tolist() == pictures.owners[torch.from_numpy(choose(5, 3))].tolist()
    assert limited.owner_names == pictures.owner_names
    unknown = load(settings_of("cifar10", path=str(tmp_path), size=4), "federated")
    assert (unknown.owners, unknown.owner_names) == (None, ())


def test_owners_may_be_numbers_and_divide_the_pictures(tmp_path: Path) -> None:
    contents = table([1, 2, 3, 4, 5, 6], [0] * 6).append_column("hospital", pa.array([70, 8, 70, 8, 8, 70], pa.int16()))
    pq.write_table(contents, tmp_path / "train.parquet")
    pictures = load(settings_of("cifar10", path=str(tmp_path), size=4, owner="hospital"), "federated")
    assert (pictures.owner_names, pictures.owners.tolist()) == (("8", "70"), [1, 0, 1, 0, 0, 1])
    rule = compose(["seed=1", "num_clients=2", "partition=natural"]).partition
    parts = partition.split(rule, pictures)
    assert sorted(part.tolist() for part in parts) == [[0, 2, 5], [1, 3, 4]]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, r"no column 'who' \(it has \['img', 'label'\]\).*dataset\.owner=null"),
        (pa.array([0.5, 1.0]), r"dataset\.owner=who is of type double; whole numbers or words are needed"),
        (
            pa.array(["ann", None]),
            r"dataset\.owner=who has no value in 1 of 2 rows, first row 1 of .*give every picture",
        ),
    ],
)
def test_owners_that_cannot_be_used_are_one_sentence(tmp_path: Path, column: pa.Array | None, message: str) -> None:
    contents = table([1, 2], [0, 1])
    pq.write_table(contents if column is None else contents.append_column("who", column), tmp_path / "train.parquet")
    with pytest.raises(InputError, match=message) as caught:
        load(settings_of("cifar10", path=str(tmp_path), size=4, owner="who"), "federated")
    assert "\n" not in str(caught.value)


def test_a_share_of_local_files_without_a_test_is_held_out(tmp_path: Path) -> None:
    values, labels = list(range(0, 200, 10)), [0] * 10 + [1] * 10
    pq.write_table(table(values, labels), tmp_path / "mine.parquet")
    data = settings_of("cifar10", path=str(tmp_path), size=4)
    assert load(data, "test") is None
    assert len(load(data, "train").images) == 20
    data = settings_of("cifar10", path=str(tmp_path), size=4, test_fraction=0.2)
    train, test = (load(data, split) for split in ("train", "test"))
    assert train is load(data, "federated")  # clients do not train on what they are tested by
    assert sorted(first_pixels(train.images) + first_pixels(test.images)) == values
    assert torch.bincount(test.labels).tolist() == [2, 2]
    assert [value >= 100 for value in first_pixels(test.images)] == test.labels.bool().tolist()
    # Tiny ImageNet calls its test "valid".
    other = settings_of("tiny_imagenet", path=str(tmp_path), size=4, test_fraction=0.2, image="img")
    assert first_pixels(load(other, "test").images) == first_pixels(test.images)
    limited = settings_of("cifar10", path=str(tmp_path), size=4, test_fraction=0.2, limit=5, test_limit=3)
    assert not {*first_pixels(load(limited, "train").images)} & {*first_pixels(test.images)}
    assert (len(load(limited, "train").images), len(load(limited, "test").images)) == (5, 3)
    # A file for the test is taken as it is.
    pq.write_table(table(values, labels), tmp_path / "mine-train.parquet")
    pq.write_table(table([7], [1]), tmp_path / "mine-test.parquet")
    (tmp_path / "mine.parquet").unlink()
    base._read.cache_clear()
    assert first_pixels(load(data, "test").images) == [7]
    assert len(load(data, "train").images) == 20


def test_a_share_that_cannot_be_held_out(tmp_path: Path) -> None:
    pq.write_table(table([0, 10], [None, None]), tmp_path / "mine.parquet")
    data = settings_of("cifar10", path=str(tmp_path), size=4, test_fraction=0.5)
    assert load(data, "test") is None
    assert len(load(data, "federated").images) == 2
    for changes, message in (
        ({"test_fraction": 1.0, "path": str(tmp_path)}, r"dataset\.test_fraction=1\.0 must be at least 0 and below 1"),
        ({"test_fraction": 0.2}, r"dataset\.test_fraction=0\.2 is for local files, but dataset\.path is null"),
    ):
        with pytest.raises(InputError, match=message):
            load(settings_of("cifar10", **changes), "federated")


def test_hidden_files_are_no_match_of_a_pattern(folder: Path) -> None:
    (folder / "data" / "._train-00000-of-00002.parquet").write_bytes(b"a hidden file of another system")
    settings = settings_of("cifar10", path=str(folder / "data" / "*train-*-of-00002*.parquet"), size=4)
    assert len(load(settings, "federated").images) == 5
    for pattern in ("nothing*.parquet", "***"):
        with pytest.raises(InputError, match=r"holds no \.parquet or \.arrow file"):
            load(settings_of("cifar10", path=str(folder / pattern), size=4), "federated")


def test_missing_label_column_is_said_and_means_no_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pq.write_table(table([1, 2], [0, 1], label="target"), tmp_path / "train.parquet")
    settings = settings_of("cifar10", path=str(tmp_path), size=4)
    with caplog.at_level(logging.WARNING):
        assert load(settings, "federated").labels is None
    assert "no column 'label'" in caplog.text
    assert load(settings, "train") is None


@pytest.mark.parametrize(
    ("name", "contents", "changes", "message"),
    [
        ("train.parquet", b"rubbish", {}, r"train\.parquet cannot be read"),
        ("train.arrow", b"rubbish", {}, r"train\.arrow cannot be read"),
        ("train.txt", b"", {}, r"holds no \.parquet or \.arrow file"),
        ("test.parquet", table([1], [0]), {}, r"dataset\.splits\.federated=train names no pictures"),
        ("train.parquet", table([1], [0], image="image"), {}, r"no column 'img' \(it has \['image', 'label'\]\)"),
        ("train.parquet", table([1, 2], [0, 2]), {"num_classes": 2}, r"dataset\.num_classes=2 but a label is 2"),
        (
            "train.parquet",
            pa.table({"img": [b"", b"x"], "label": [0, 1]}),
            {},
            r"none of the 2 pictures can be read: row 0 of the split 'train' in .* \(it is no picture of JPEG",
        ),
        (
            "train.parquet",
            pa.table({"img": [png(picture(1))], "label": ["cat"]}),
            {},
            r"dataset\.label=label is of type string",
        ),
    ],
)
def test_bad_files_are_one_sentence(
    tmp_path: Path, name: str, contents: bytes | pa.Table, changes: dict, message: str
) -> None:
    if isinstance(contents, bytes):
        (tmp_path / name).write_bytes(contents)
    else:
        pq.write_table(contents, tmp_path / name)
    with pytest.raises(InputError, match=message):
        load(settings_of("cifar10", path=str(tmp_path), size=4, **changes), "federated")


def test_hub_is_read_from_the_arrow_files_of_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = table([5, 6], [1, 0])
    with pa.ipc.new_stream(str(tmp_path / "cache.arrow"), contents.schema) as writer:
        writer.write_table(contents)
    asked = []

    class FederatedDataset:
        def __init__(self, *, dataset: str, partitioners: dict, shuffle: bool) -> None:
            asked.append((dataset, partitioners, shuffle))

        def load_split(self, split: str) -> SimpleNamespace:
            asked.append(split)
            return SimpleNamespace(cache_files=[{"filename": str(tmp_path / "cache.arrow")}])

    monkeypatch.setitem(sys.modules, "flwr_datasets", ModuleType("flwr_datasets"))
    monkeypatch.setattr(sys.modules["flwr_datasets"], "FederatedDataset", FederatedDataset, raising=False)
    pictures = load(settings_of("cifar10", size=4), "federated")
    assert asked == [("uoft-cs/cifar10", {}, False), "train"]
    assert (first_pixels(pictures.images), pictures.labels.tolist()) == ([5, 6], [1, 0])


def test_unreachable_hub_says_how_to_use_local_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**_: object) -> None:
        raise ConnectionError("Couldn't reach the Hub\nlong story")

    monkeypatch.setitem(sys.modules, "flwr_datasets", ModuleType("flwr_datasets"))
    monkeypatch.setattr(sys.modules["flwr_datasets"], "FederatedDataset", unreachable, raising=False)
    with pytest.raises(InputError, match=r"uoft-cs/cifar100 .*Couldn't reach the Hub\).*dataset\.path=FILE_OR_FOLDER$"):
        load(settings_of("cifar100"), "federated")


# --- image_folder ---------------------------------------------------------------------------------------------------


def write(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def own(path: Path, **changes: object) -> DataSettings:
    return settings_of("image_folder", path=str(path), size=4, **changes)


def test_loose_pictures_of_any_kind_have_no_labels(tmp_path: Path) -> None:
    write(tmp_path / "b.png", picture(20, mode="RGB"))
    write(tmp_path / "a.png", picture(10, mode="L"))
    write(tmp_path / "d.webp", Image.new("RGBA", (9, 7), (40, 0, 0, 255)))
    write(tmp_path / "c.gif", Image.new("P", (4, 4)))
    write(tmp_path / "E.BMP", picture(50))
    (tmp_path / "notes.txt").write_text("not a picture")
    (tmp_path / "._a.png").write_bytes(b"a hidden file of another system")
    pictures = load(own(tmp_path), "federated")
    assert first_pixels(pictures.images)[:4] == [50, 10, 20, 0]  # E.BMP, a, b, c, d: sorted paths
    assert abs(first_pixels(pictures.images)[4] - 40) <= 3  # WebP is lossy
    assert pictures.images.shape == (5, 3, 4, 4)
    assert pictures.labels is None
    assert load(own(tmp_path), "train") is None
    assert load(own(tmp_path), "test") is None
    grey = load(own(tmp_path, channels=1, mean=[0.5], std=[0.2]), "federated")
    assert grey.images.shape == (5, 1, 4, 4)


def test_subfolders_are_classes_and_a_fifth_is_held_out(tmp_path: Path) -> None:
    for number in range(10):
        write(tmp_path / "cat" / f"{number}.png", picture(number))
        write(tmp_path / "ape" / "deeper" / f"{number}.png", picture(100 + number))
    train, test = load(own(tmp_path), "train"), load(own(tmp_path), "test")
    assert train is load(own(tmp_path), "federated")
    assert train.classes == test.classes == ("ape", "cat")
    assert torch.bincount(train.labels).tolist() == [8, 8]
    assert torch.bincount(test.labels).tolist() == [2, 2]
    for pictures in (train, test):
        assert ((pictures.images[:, 0, 0, 0] < 100).long() == pictures.labels).all()
    both = first_pixels(train.images) + first_pixels(test.images)
    assert sorted(both) == [*range(10), *range(100, 110)]
    base._read.cache_clear()
    assert torch.equal(load(own(tmp_path), "test").images, test.images)
    assert load(own(tmp_path, test_fraction=0), "test") is None
    assert len(load(own(tmp_path, test_fraction=0), "train").images) == 20


def test_subfolders_may_be_owners(tmp_path: Path) -> None:
    for name, values in {"phone-7": [1, 2, 3], "phone-10": [4, 5], ".trash": [9]}.items():
        for value in values:
            write(tmp_path / name / f"{value}.png", picture(value))
    pictures = load(own(tmp_path, folders="owner"), "federated")
    assert first_pixels(pictures.images) == [4, 5, 1, 2, 3]  # phone-10 before phone-7
    assert (pictures.owner_names, pictures.owners.tolist()) == (("phone-10", "phone-7"), [0, 0, 1, 1, 1])
    assert pictures.owners.dtype == torch.int64
    assert (pictures.labels, pictures.classes) == (None, ())
    assert load(own(tmp_path, folders="owner"), "test") is None
    by_class = load(own(tmp_path, test_fraction=0), "federated")
    assert (by_class.owners, by_class.owner_names, by_class.labels.tolist()) == (None, (), [0, 0, 1, 1, 1])


def test_owners_with_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second owner has no ant; one picture of the first cannot be read."""
    for name, value in (("ann/bee/1.png", 1), ("ann/ant/x/2.png", 2), ("ben/bee/3.png", 3), ("ben/cow/4.png", 4)):
        write(tmp_path / "train" / name, picture(value))
    (tmp_path / "train" / "ann" / "ant" / "0.png").write_bytes(b"")
    for name, value in (("eve/ant/5.png", 5), ("eve/bee/6.png", 6), ("eve/cow/7.png", 7)):
        write(tmp_path / "test" / name, picture(value))
    settings = own(tmp_path, folders="owner/class")
    with caplog.at_level(logging.WARNING):
        pictures = load(settings, "federated")
    assert "1 of 5 pictures cannot be read" in caplog.text
    assert first_pixels(pictures.images) == [2, 1, 3, 4]
    assert (pictures.classes, pictures.labels.tolist()) == (("ant", "bee", "cow"), [0, 1, 1, 2])
    assert (pictures.owner_names, pictures.owners.tolist()) == (("ann", "ben"), [0, 0, 1, 1])
    test = load(settings, "test")
    assert (test.classes, test.labels.tolist(), test.owner_names) == (("ant", "bee", "cow"), [0, 1, 2], ("eve",))


def test_a_fifth_of_every_class_is_held_out_whoever_made_it(tmp_path: Path) -> None:
    for owner in range(5):
        for name in ("ape", "cat"):
            for number in range(2):
                write(tmp_path / f"phone-{owner}" / name / f"{number}.png", picture(10 * owner + number))
    settings = own(tmp_path, folders="owner/class")
    train, test = load(settings, "federated"), load(settings, "test")
    assert torch.bincount(train.labels).tolist() == [8, 8]
    assert torch.bincount(test.labels).tolist() == [2, 2]
    for pictures in (train, test):
        assert (pictures.images[:, 0, 0, 0] // 10).tolist() == pictures.owners.tolist()


@pytest.mark.parametrize(
    ("folders", "files", "message"),
    [
        ("classes", ["a/1.png"], r"dataset\.folders=classes is unknown; choose one of class, owner, owner/class"),
        ("owner", ["1.png", "2.png"], r"2 loose pictures but dataset\.folders=owner needs.*\(one per owner\)$"),
        ("owner", ["1.png", "ann/2.png"], r"1 loose pictures beside the subfolders \['ann'\].*\(one per owner\)$"),
        (
            "owner/class",
            ["ann/1.png"],
            r"ann holds 1 loose .*\(one per class\), or give dataset\.folders=owner for no la",
        ),
        ("owner/class", ["ann/1.png", "ann/bee/2.png"], r"ann holds 1 loose pictures beside the subfolders \['bee'\]"),
        ("owner/class", ["1.png", "ann/bee/2.png"], r"beside the subfolders \['ann'\].*\(one per owner\)$"),
        ("owner", ["ann/notes.txt"], "holds no picture"),
        ("owner/class", ["train/ann/bee/1.png", "test/eve/cow/1.png"], r"classes \['cow'\] but .* has \['bee'\]"),
    ],
)
def test_folders_in_another_form_are_one_sentence(tmp_path: Path, folders: str, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(png(picture(1)))
    with pytest.raises(InputError, match=message) as caught:
        load(own(tmp_path, folders=folders), "test")
    assert "\n" not in str(caught.value)


def test_train_and_test_folders(tmp_path: Path) -> None:
    write(tmp_path / "train" / "1.png", picture(1))
    write(tmp_path / "train" / "2.png", picture(2))
    assert load(own(tmp_path), "test") is None
    write(tmp_path / "test" / "3.png", picture(3))
    base._read.cache_clear()
    assert first_pixels(load(own(tmp_path), "federated").images) == [1, 2]
    assert load(own(tmp_path), "test") is None  # no labels
    for name, value in (("train/x/1.png", 1), ("train/y/2.png", 2), ("test/y/3.png", 3), ("test/x/4.png", 4)):
        write(tmp_path / "labelled" / name, picture(value))
    settings = own(tmp_path / "labelled")
    assert load(settings, "train").labels.tolist() == [0, 1]
    assert first_pixels(load(settings, "test").images) == [4, 3]


def test_unreadable_files_are_counted_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):
        write(tmp_path / f"class{number % 2}" / f"{number:02d}.png", picture(number))
    whole = (tmp_path / "class0" / "04.png").read_bytes()
    (tmp_path / "class0" / "04.png").write_bytes(whole[: len(whole) // 2])
    for number in (1, 3, 5, 7, 9, 11):
        (tmp_path / "class1" / f"{number:02d}.png").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        pictures = load(own(tmp_path, test_fraction=0), "federated")
    assert first_pixels(pictures.images) == [0, 2, 6, 8, 10, 12, 14, 16, 18, 13, 15, 17, 19]
    assert pictures.labels.tolist() == [0] * 9 + [1] * 4
    (record,) = caplog.records
    assert record.getMessage().startswith("7 of 20 pictures cannot be read, the rest is used: ")
    assert str(tmp_path / "class0" / "04.png") in record.getMessage()
    assert "and 2 more" in record.getMessage()


def test_unusable_folders_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"dataset\.path=null .* give dataset\.path=FOLDER"):
        load(settings_of("image_folder"), "federated")
    with pytest.raises(InputError, match="is not a folder"):
        load(own(tmp_path / "nowhere"), "federated")
    (tmp_path / "empty" / "class").mkdir(parents=True)
    with pytest.raises(InputError, match=r"holds no picture; allowed are files ending in \.bmp"):
        load(own(tmp_path / "empty"), "federated")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "1.png").write_bytes(b"x")
    with pytest.raises(InputError, match="none of the 1 pictures can be read"):
        load(own(tmp_path / "broken"), "federated")
    write(tmp_path / "mixed" / "1.png", picture(1))
    write(tmp_path / "mixed" / "class" / "2.png", picture(2))
    with pytest.raises(InputError, match="1 loose pictures beside the subfolders"):
        load(own(tmp_path / "mixed"), "federated")
    write(tmp_path / "float" / "1.tif", Image.new("F", (4, 4)))
    with pytest.raises(InputError, match=r"1\.tif \(wrong channels"):
        load(own(tmp_path / "float"), "federated")
    write(tmp_path / "two" / "train" / "x" / "1.png", picture(1))
    write(tmp_path / "two" / "test" / "z" / "1.png", picture(1))
    with pytest.raises(InputError, match=r"has the classes \['z'\] but .* has \['x'\]"):
        load(own(tmp_path / "two"), "test")
    with pytest.raises(InputError, match=r"dataset\.test_fraction=1"):
        load(own(tmp_path / "two", test_fraction=1), "test")


# --- real files -----------------------------------------------------------------------------------------------------


def test_real_cifar10_has_the_statistics_of_the_yaml(cifar10: str) -> None:
    settings = settings_of("cifar10", path=cifar10)
    pictures = load(settings, "test")
    assert pictures.images.shape == (10000, 3, 32, 32)
    assert torch.bincount(pictures.labels).tolist() == [1000] * 10
    assert pictures.classes[0] == "airplane"
    mean = pictures.images.float().mean(dim=(0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor(list(settings.mean)), atol=0.01)
