"""Image folders, written by the tests."""

import logging
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedssl.config.settings import DataSettings
from fedssl.datasets import base
from fedssl.datasets.base import load_federated, load_split
from fedssl.errors import InputError
from fedssl.evaluation.protocol import load_labeled
from tests.fedssl.datasets.made import first_pixels, make_image, png, settings_of

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


def write(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def own(path: Path, **changes: object) -> DataSettings:
    return settings_of("folder", path=str(path), size=4, **changes)


def test_loose_images_of_any_kind_have_no_labels(tmp_path: Path) -> None:
    write(tmp_path / "b.png", make_image(20, mode="RGB"))
    write(tmp_path / "a.png", make_image(10, mode="L"))
    write(tmp_path / "d.webp", Image.new("RGBA", (9, 7), (40, 0, 0, 255)))
    write(tmp_path / "c.gif", Image.new("P", (4, 4)))
    write(tmp_path / "E.BMP", make_image(50))
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "._a.png").write_bytes(b"a hidden file of another system")
    image_data = load_federated(own(tmp_path))
    assert first_pixels(image_data.images)[:4] == [50, 10, 20, 0]  # E.BMP, a, b, c, d: sorted paths
    assert abs(first_pixels(image_data.images)[4] - 40) <= 3  # WebP is lossy
    assert image_data.images.shape == (5, 3, 4, 4)
    assert image_data.labels is None
    assert load_labeled(own(tmp_path), "train") is None
    assert load_labeled(own(tmp_path), "test") is None
    gray = load_federated(own(tmp_path, channels=1, mean=[0.5], std=[0.2]))
    assert gray.images.shape == (5, 1, 4, 4)


def test_subfolders_are_classes_and_a_fifth_is_held_out(tmp_path: Path) -> None:
    for number in range(10):
        write(tmp_path / "cat" / f"{number}.png", make_image(number))
        write(tmp_path / "ape" / "deeper" / f"{number}.png", make_image(100 + number))
    train, test = load_split(own(tmp_path), "train"), load_split(own(tmp_path), "test")
    assert train is load_federated(own(tmp_path))
    assert train.classes == test.classes == ("ape", "cat")
    assert torch.bincount(train.labels).tolist() == [8, 8]
    assert torch.bincount(test.labels).tolist() == [2, 2]
    for image_data in (train, test):
        assert ((image_data.images[:][:, 0, 0, 0] < 100).long() == image_data.labels).all()
    both = first_pixels(train.images) + first_pixels(test.images)
    assert sorted(both) == [*range(10), *range(100, 110)]
    base.forget_images()
    assert torch.equal(load_split(own(tmp_path), "test").images[:], test.images[:])
    assert load_split(own(tmp_path, test_fraction=0), "test") is None
    assert len(load_split(own(tmp_path, test_fraction=0), "train").images) == 20


@pytest.mark.parametrize(
    ("folders", "files", "message"),
    [
        ("classes", ["a/1.png"], r"^dataset\.folders=classes must be class or .* or owner/class or .*none$"),
        ("class", ["1.png", "class/2.png"], "1 loose images beside the subfolders"),
        ("owner", ["1.png", "2.png"], r"2 loose images but dataset\.folders=owner needs.*\(one per owner\)$"),
        ("owner", ["1.png", "ann/2.png"], r"1 loose images beside the subfolders ann.*\(one per owner\)$"),
        (
            "owner/class",
            ["ann/1.png"],
            r"ann holds 1 loose .*\(one per class\), or give dataset\.folders=owner for no la",
        ),
        ("owner/class", ["ann/1.png", "ann/bee/2.png"], r"ann holds 1 loose images beside the subfolders bee"),
        ("owner/class", ["1.png", "ann/bee/2.png"], r"beside the subfolders ann.*\(one per owner\)$"),
        ("owner", ["ann/notes.txt"], "holds no image"),
        (
            "owner/class",
            ["train/ann/bee/1.png", "train/ann/ant/1.png", "test/eve/cow/1.png"],
            r"/train has the classes ant, bee but .*/test has none of them; set dataset\.path=\S*/train to hold out",
        ),
    ],
)
def test_folders_in_another_form_are_one_sentence(tmp_path: Path, folders: str, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(png(make_image(1)))
    with pytest.raises(InputError, match=message) as caught:
        load_split(own(tmp_path, folders=folders), "test")
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_counted_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):
        write(tmp_path / f"class{number % 2}" / f"{number:02d}.png", make_image(number))
    whole = (tmp_path / "class0" / "04.png").read_bytes()
    (tmp_path / "class0" / "04.png").write_bytes(whole[: len(whole) // 2])
    for number in (1, 3, 5, 7, 9, 11):
        (tmp_path / "class1" / f"{number:02d}.png").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        image_data = load_federated(own(tmp_path, test_fraction=0))
    assert first_pixels(image_data.images) == [0, 2, 6, 8, 10, 12, 14, 16, 18, 13, 15, 17, 19]
    assert image_data.labels.tolist() == [0] * 9 + [1] * 4
    (record,) = caplog.records
    assert record.getMessage().startswith("7 of 20 images cannot be read, the rest is used: ")
    assert str(tmp_path / "class0" / "04.png") in record.getMessage()
    assert "(the file is empty)" in record.getMessage()
    assert "and 2 more" in record.getMessage()


def test_unusable_folders_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"dataset\.path=null .* give dataset\.path=FOLDER"):
        load_federated(settings_of("folder"))
    with pytest.raises(InputError, match="is not a folder"):
        load_federated(own(tmp_path / "nowhere"))
    (tmp_path / "empty" / "class").mkdir(parents=True)
    with pytest.raises(InputError, match=r"holds no image; allowed are files ending in \.arrow .* \.avif \.bmp"):
        load_federated(own(tmp_path / "empty"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "1.png").write_bytes(b"x")
    with pytest.raises(InputError, match="none of the 1 images can be read"):
        load_federated(own(tmp_path / "broken"))
    write(tmp_path / "float" / "1.tif", Image.new("F", (4, 4)))
    with pytest.raises(InputError, match=r"1\.tif \(its values are float32"):
        load_federated(own(tmp_path / "float"))
    with pytest.raises(InputError, match=r"dataset\.test_fraction=1"):
        load_split(own(tmp_path / "float", test_fraction=1), "test")


@pytest.mark.parametrize(("patients", "warned"), [(2, True), (1, False)])
def test_folders_within_classes_are_a_warning(tmp_path: Path, log_again: None, caplog, patients, warned) -> None:
    for number in range(20):
        name = f"p{number % patients}/{number}.png"
        write(tmp_path / "ill" / name, make_image(number))
        write(tmp_path / "well" / f"other {name}", make_image(100 + number))
    assert load_split(own(tmp_path), "test") is not None
    line = "if a folder is a patient or a scene, set dataset.group=folder"
    assert sum(line in message for message in caplog.messages) == warned
    grouped = own(tmp_path, group="folder", test_fraction=0.5)
    train, test = load_split(grouped, "train"), load_split(grouped, "test")
    assert patients == 1 or {*train.groups.tolist()}.isdisjoint(test.groups.tolist())


def test_warnings_of_a_folder_are_logged_once_per_run(tmp_path: Path, log_again: None, caplog) -> None:
    for number in range(20):
        write(tmp_path / ("images", "masks")[number % 2] / f"{number}.png", make_image(number))
    for _ in range(2):
        assert load_split(own(tmp_path), "train") is not None
        assert load_split(own(tmp_path), "test") is not None
        assert sum("if these are masks" in message for message in caplog.messages) == 1
        caplog.clear()
        base.find_changes()


def test_subfolders_may_be_owners(tmp_path: Path) -> None:
    for name, values in {"phone-7": [1, 2, 3], "phone-10": [4, 5], ".trash": [9]}.items():
        for value in values:
            write(tmp_path / name / f"{value}.png", make_image(value))
    image_data = load_federated(own(tmp_path, folders="owner"))
    assert first_pixels(image_data.images) == [4, 5, 1, 2, 3]  # phone-10 before phone-7
    assert (image_data.owner_names, image_data.owners.tolist()) == (("phone-10", "phone-7"), [0, 0, 1, 1, 1])
    assert image_data.owners.dtype == torch.int64
    assert (image_data.labels, image_data.classes) == (None, ())
    assert load_labeled(own(tmp_path, folders="owner"), "test") is None


@pytest.mark.parametrize("name", ["pacs", "domainnet"])
def test_domains_are_columns_or_folders(name: str, tmp_path: Path, log_again: None, caplog) -> None:
    """As these data sets are downloaded from their authors."""
    for number in range(8):
        folder = ("photo", "sketch")[number // 4], ("ant", "bee")[number // 2 % 2]
        write(tmp_path.joinpath(*folder, f"{number}.png"), make_image(number))
    data = settings_of(name, path=str(tmp_path), size=4)
    images = load_federated(data)
    assert (images.owner_names, images.owners.tolist()) == (("photo", "sketch"), [0] * 4 + [1] * 4)
    assert (images.classes, images.labels.tolist()) == (("ant", "bee"), [0, 0, 1, 1] * 2)
    held_out = load_split(settings_of(name, path=str(tmp_path), size=4, held_out="sketch"), "test")
    assert first_pixels(held_out.images) == [4, 5, 6, 7]
    assert load_split(settings_of("folder", path=str(tmp_path), size=4, folders="domain/class"), "test") is not None
    assert "dataset.group=folder" not in caplog.text  # a class has a folder per domain


def test_masks_beside_their_images_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of BUSI, where an image may have several masks; a mask without its image is an image."""
    names = {"cat": ["a (1)", "a (1)_mask", "a (1)_mask_1", "a_mask"], "dog": ["b", "b_Mask", "c_masked", "c", "mask"]}
    for number, name in enumerate(f"{folder}/{stem}.png" for folder, stems in names.items() for stem in stems):
        write(tmp_path / name, make_image(10 * number))
    data = own(tmp_path, test_fraction=0.0)
    assert first_pixels(load_federated(data).images) == [0, 30, 40, 70, 60, 80]
    assert "3 images are ignored as masks of those beside them" in caplog.text
    alone = shlex.split(caplog.text.partition("to read these alone, set ")[2].splitlines()[0])[0]
    path = alone.removeprefix("dataset.path=")
    assert first_pixels(load_federated(own(Path(path), test_fraction=0.0, label=None)).images) == [10, 20, 30, 50, 60]


def test_masks_are_ignored_beside_links(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "test")):
        for name in ("0", "0_mask", "1"):
            write(tmp_path / split / "cat" / f"{name}.png", make_image(10 * number))
    (tmp_path / "train" / "cat" / "2.png").symlink_to(tmp_path / "train" / "cat" / "1.png")
    assert [len(load_split(own(tmp_path), split).images) for split in ("train", "test")] == [2, 2]


def test_owners_with_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second owner has no ant; one image of the first is unreadable."""
    for name, value in (("ann/bee/1.png", 1), ("ann/ant/x/2.png", 2), ("ben/bee/3.png", 3), ("ben/cow/4.png", 4)):
        write(tmp_path / "train" / name, make_image(value))
    (tmp_path / "train" / "ann" / "ant" / "0.png").write_bytes(b"")
    for name, value in (("eve/ant/5.png", 5), ("eve/bee/6.png", 6), ("eve/cow/7.png", 7)):
        write(tmp_path / "test" / name, make_image(value))
    settings = own(tmp_path, folders="owner/class")
    with caplog.at_level(logging.WARNING):
        image_data = load_federated(settings)
    assert "1 of 5 images cannot be read" in caplog.text
    assert first_pixels(image_data.images) == [2, 1, 3, 4]
    assert (image_data.classes, image_data.labels.tolist()) == (("ant", "bee", "cow"), [0, 1, 1, 2])
    assert (image_data.owner_names, image_data.owners.tolist()) == (("ann", "ben"), [0, 0, 1, 1])
    test = load_split(settings, "test")
    assert (test.classes, test.labels.tolist(), test.owner_names) == (("ant", "bee", "cow"), [0, 1, 2], ("eve",))


def test_a_fifth_of_every_class_is_held_out(tmp_path: Path) -> None:
    for owner in range(5):
        for name in ("ape", "cat"):
            for number in range(2):
                write(tmp_path / f"phone-{owner}" / name / f"{number}.png", make_image(10 * owner + number))
    settings = own(tmp_path, folders="owner/class")
    train, test = load_federated(settings), load_split(settings, "test")
    assert torch.bincount(train.labels).tolist() == [8, 8]
    assert torch.bincount(test.labels).tolist() == [2, 2]
    for image_data in (train, test):
        assert (image_data.images[:][:, 0, 0, 0] // 10).tolist() == image_data.owners.tolist()


@pytest.mark.parametrize(
    ("pattern", "pixels"),
    [
        ("**/*.png", [1, 2, 3]),
        ("*/**/*.png", [1, 2, 3]),
        ("{**/1.png,d*/**/*}", [1, 2, 3]),
        ("**/sub/?.*", [3]),
        ("{cat,dog}", [1, 2, 3]),
        ("**/dog/*.png", [2]),
    ],
)
def test_patterns_follow_links_to_folders_once(tmp_path: Path, pattern: str, pixels: list[int]) -> None:
    root = tmp_path / "data"
    for number, name in enumerate(("data/cat/1.png", "disk/2.png", "disk/sub/3.png"), start=1):
        write(tmp_path / name, make_image(number))
    for link, target in {"dog": tmp_path / "disk", "ape": root / "cat", "cat/loop": root}.items():
        (root / link).symlink_to(target)
    data = load_split(own(root / pattern, test_fraction=0), "train")
    assert first_pixels(data.images) == pixels
    assert data.classes == (("cat", "dog") if len(pixels) > 1 else ())


PATTERNS = ["{train,val}/*/*.png", "{train,val}", "{train,val}/{cat,dog}/{1..2}.png", "{train/{cat,dog},val/*}/*.png"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_braces_stand_for_several_patterns(tmp_path: Path, pattern: str) -> None:
    """As in shells and in WebDataset. The folder of the data set has the characters of a pattern."""
    root = tmp_path / "data [1] {a}"
    for number, split in enumerate(("train", "val", "other")):
        for place, name in enumerate(("cat", "dog")):
            for file in (1, 2):
                write(root / split / name / f"{file}.png", make_image(100 * number + 10 * place + file))
    for split, pixels in (("train", [1, 2, 11, 12]), ("test", [101, 102, 111, 112])):
        data = load_split(own(root / pattern), split)
        assert (first_pixels(data.images), data.classes) == (pixels, ("cat", "dog"))
    with pytest.raises(InputError, match=r"names 2 files or patterns, of which 1 match no file, such as .*/x; correct"):
        load_split(own(root / "{train,x}"), "train")
    with pytest.raises(InputError, match=r"names above 1,000,000 files; use \*"):
        load_split(own(root / "{0..99999}{0..99999}.png"), "train")
