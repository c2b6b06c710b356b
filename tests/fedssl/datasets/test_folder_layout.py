"""Recognition of splits, owners and classes from the folders of a data set."""

import unicodedata
from pathlib import Path

import pytest

from fedssl.datasets.image_index import ImageIndex
from fedssl.datasets.path_index import index_path
from fedssl.errors import InputError
from tests.fedssl.datasets.made import query_of, touch

SPLITS = ("train", "test")


pytestmark = pytest.mark.usefixtures("log_again")


def list_split(split: str, root: Path, **changes: object) -> ImageIndex | None:
    return index_path(str(root), query_of(split, **changes))


def labeled(root: Path, file_list: ImageIndex | None) -> dict[str, str | None] | None:
    """Return the class of each file by its path below the root."""
    if file_list is None:
        return None
    labels = [None] * len(file_list.files) if file_list.labels is None else file_list.labels
    names = [None if label is None else file_list.classes[label] for label in labels]
    return {str(Path(file).relative_to(root)): name for file, name in zip(file_list.files, names, strict=True)}


def classes_of(root: Path, **changes: object) -> list[tuple[str, ...] | None]:
    lists = [list_split(split, root, **changes) for split in SPLITS]
    return [None if file_list is None else file_list.classes for file_list in lists]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Training", "Testing"),
        ("Train", "Test"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("archive/train", "archive/eval"),
        ("train2017", "val2017"),
        ("data/x/my training set", "data/x/dev-1"),
    ],
)
def test_folders_named_after_splits_are_splits(tmp_path: Path, train: str, test: str) -> None:
    root = touch(tmp_path, f"{train}/cat/1.png", f"{train}/dog/2.png", f"{test}/cat/3.png", f"{test}/dog/4.png")
    touch(root, "README.md", ".ipynb_checkpoints/1.png", "annotations/1.json", "archive/notes/x.txt")
    found = [labeled(root, list_split(split, root)) for split in SPLITS]
    assert found == [
        {f"{train}/cat/1.png": "cat", f"{train}/dog/2.png": "dog"},
        {f"{test}/cat/3.png": "cat", f"{test}/dog/4.png": "dog"},
    ]


@pytest.fixture
def tiny_imagenet(tmp_path: Path) -> Path:
    """Make the folders of the download, whose validation has a list of classes and whose test has no labels."""
    root = touch(tmp_path, "train/n1/images/n1_0.JPEG", "train/n2/images/n2_0.JPEG", "train/n1/n1_boxes.txt")
    touch(root, "test/images/test_0.JPEG", "val/images/val_0.JPEG", "val/images/val_1.JPEG", "wnids.txt")
    (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn2\t0\t32\t44\t62\nval_1.JPEG\tn1\t52\t55\t57\t59\n")
    return root


def test_a_list_names_the_classes_of_tiny_imagenet(tiny_imagenet: Path) -> None:
    train, test = (labeled(tiny_imagenet, list_split(split, tiny_imagenet)) for split in SPLITS)
    assert train == {"train/n1/images/n1_0.JPEG": "n1", "train/n2/images/n2_0.JPEG": "n2"}
    assert test == {"val/images/val_0.JPEG": "n2", "val/images/val_1.JPEG": "n1"}


def test_links_to_training_images_have_no_list_of_classes(tiny_imagenet: Path) -> None:
    for number in (0, 1):
        link = tiny_imagenet / f"val/images/val_{number}.JPEG"
        link.unlink()
        link.symlink_to(tiny_imagenet / f"train/n{number + 1}/images/n{number + 1}_0.JPEG")
    with pytest.raises(InputError, match="2 of the 2 images of .*val are also in .*train, by links"):
        list_split("test", tiny_imagenet)


def test_names_of_a_list_are_of_one_image_each(tiny_imagenet: Path) -> None:
    touch(tiny_imagenet, "val/others/val_1.JPEG")
    with pytest.raises(InputError, match="names that several images below .*val have; give each image another name"):
        list_split("test", tiny_imagenet)


def test_a_folder_around_the_domains_is_named(tmp_path: Path) -> None:
    names = [f"PACS/kfold/{domain}/{name}/1.png" for domain in ("photo", "sketch") for name in ("cat", "dog")]
    touch(tmp_path, *names)
    (warning,) = list_split("train", tmp_path / "PACS", folders="owner/class").warnings
    path = warning.partition("dataset.path=")[2]
    assert "all images are of one owner (domain), kfold; if this folder only holds the owners, set data" in warning
    index = list_split("train", Path(path), folders="owner/class")
    assert (index.owner_names, index.classes, index.warnings) == (("photo", "sketch"), ("cat", "dog"), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "val_0.JPEG\tn2\n",
            r"val_annotations.txt has no class of val_1.JPEG; complete it, or delete it for no labels",
        ),
        ("some notes\n", "test has the classes images but .*train has n1, n2"),  # not a list of images
    ],
)
def test_a_list_without_every_image_is_refused(tiny_imagenet: Path, text: str, message: str) -> None:
    (tiny_imagenet / "val/val_annotations.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        list_split("test", tiny_imagenet)


def test_a_copy_of_the_splits_beside_them_is_ignored(tmp_path: Path, caplog) -> None:
    """As in the archive of chest X-rays that most people have; a folder with other images is no copy."""
    names = [f"{split}/{name}" for split in ("train", "test") for name in ("normal/1.png", "ill/2.png")]
    root = touch(tmp_path, *names, *(f"chest_xray/{name}" for name in names))
    with caplog.at_level("INFO"):
        found = [labeled(root, list_split(split, root)) for split in SPLITS]
    assert [[*one] for one in found] == [[names[1], names[0]], [names[3], names[2]]]
    assert list_split("train", root).classes == ("ill", "normal")
    assert "4 images outside the splits are not used" in caplog.text
    assert "without images" not in caplog.text
    touch(root, "chest_xray/train/ill/3.png")
    with pytest.raises(InputError, match=r"named after splits \(test, train\) beside others \(chest_xray\)"):
        list_split("train", root)


def test_splits_beside_other_folders_need_a_setting(tmp_path: Path) -> None:
    names = [f"{split}/{split}/{name}" for split in ("seg_train", "seg_test") for name in ("sea/1.png", "street/2.png")]
    root = touch(tmp_path, *names, "seg_pred/seg_pred/3.png")
    with pytest.raises(InputError, match=r"\(seg_test, seg_train\) beside others \(seg_pred\).*split_folders=true"):
        list_split("train", root)
    assert classes_of(root, split_folders=True) == [("sea", "street")] * 2
    assert labeled(root, list_split("seg_pred", root, split_folders=True)) == {"seg_pred/seg_pred/3.png": None}
    assert classes_of(root, split_folders=False) == [("seg_pred", "seg_test", "seg_train"), None]


def test_validation_serves_without_a_test(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = touch(tmp_path, "train/a/1.png", "train/b/1.png", "val/a/2.png", "val/b/2.png")
    assert list(labeled(root, list_split("test", root))) == ["val/a/2.png", "val/b/2.png"]
    assert f"{root}: val serves as the test" in caplog.messages
    touch(root, "test/3.png", "test/4.png")  # as in ImageNet, whose test images have no labels
    assert list(labeled(root, list_split("test", root))) == ["val/a/2.png", "val/b/2.png"]
    touch(root, "eval/a/5.png")
    with pytest.raises(InputError, match=r"test, .*/eval are one split|eval, .*/test are one split"):
        list_split("testing", root)
    (root / "test" / "3.png").unlink()
    (root / "test" / "4.png").unlink()
    assert list(labeled(root, list_split("test", root))) == ["eval/a/5.png"]
    assert list(labeled(root, list_split("valid", root))) == ["val/a/2.png", "val/b/2.png"]


def test_test_images_without_labels_are_refused(tmp_path: Path) -> None:
    """As in Kaggle's competitions."""
    root = touch(tmp_path, *(f"train/{name}/{i}.png" for name in "ab" for i in range(5)), "test/test/1.png")
    with pytest.raises(InputError, match=r"train has the classes a, b but .*/test has none of them; set ") as error:
        list_split("test", root)
    remedy = Path(str(error.value).partition("dataset.path=")[2].partition(" ")[0])
    assert [len(list_split(split, remedy, test_fraction=0.2).files) for split in SPLITS] == [8, 2]
    assert labeled(root, list_split("train", root))["train/a/0.png"] == "a"


def test_an_unknown_split_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    plain = touch(tmp_path / "plain", "a/1.png", "b/1.png")
    for split in ("val", "tset", "a"):
        with pytest.raises(InputError, match=f"plain has no split '{split}', only train, test \\(a share of it\\); "):
            list_split(split, plain, test_fraction=0.2)
    split = touch(tmp_path / "split", "Train/a/1.png", "Train/b/1.png", "Test/a/1.png", "Train_0/a/1.png")
    for name in ("val", "tset", "train_1", "unlabeled"):
        with pytest.raises(InputError, match=f"split has no split '{name}', only Test, Train, Train_0; "):
            list_split(name, split)
    shards = touch(tmp_path / "shards", "train_0/a/1.png", "train_1/b/1.png")
    message = r"'train_0', but dataset\.test_fraction=0\.2 is held out of all of train_0, train_1"
    with pytest.raises(InputError, match=message):
        list_split("train_0", shards, test_fraction=0.2)
    assert len(list_split("train_0", shards).files) == 1
    only_test = touch(tmp_path / "only", "test/a/1.png", "test/b/1.png")
    with pytest.raises(InputError, match=r"no split 'train', only test; set dataset\.split_folders=false, with which"):
        list_split("train", only_test)
    for names, found in ((("Train", "Test"), "Test, Train"), (("Train",), r"Train, test \(a share of it\)")):
        folder = touch(tmp_path / "-".join(names), *(f"{name}/{label}/1.png" for name in names for label in "ab"))
        with pytest.raises(InputError, match=f"no split 'val', only {found}; name one of them in dataset.splits"):
            list_split("val", folder, test_fraction=0.2)
    assert classes_of(only_test, split_folders=False) == [("a", "b"), None]
    with pytest.raises(InputError, match=r"split_folders=true but .* has no folders of splits"):
        list_split("train", touch(tmp_path / "loose", "1.png"), split_folders=True)


@pytest.mark.parametrize("name", ["data.zip", "nowhere", "x" * 300])
def test_a_path_that_is_no_folder(tmp_path: Path, name: str) -> None:
    if name == "data.zip":
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"is not a folder, a file or a pattern|holds no image .*; unpack"):
        list_split("train", tmp_path / name)


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(InputError, match="link is a link to gone, which does not exist; give another path"):
        list_split("train", tmp_path / "link")


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    """As in CIFAR-100."""
    root = touch(tmp_path, "train/1.png", "tulip/1.png", "whale/1.png")
    assert classes_of(root) == [("train", "tulip", "whale"), None]
    assert classes_of(tmp_path, split_folders=False) == [("train", "tulip", "whale"), None]


def test_a_folder_of_one_class_has_no_labels(tmp_path: Path) -> None:
    assert classes_of(touch(tmp_path / "one", "images/1.png", "images/2.png")) == [(), None]
    assert classes_of(touch(tmp_path / "each", "train/images/1.png", "test/pictures/2.png")) == [(), ()]
    root = touch(tmp_path / "mvtec", "train/good/1.png", "test/good/2.png", "test/defect/3.png")
    assert labeled(root, list_split("train", root)) == {"train/good/1.png": "good"}
    assert labeled(root, list_split("test", root)) == {"test/defect/3.png": "defect", "test/good/2.png": "good"}
    assert list_split("train", root).classes == ("defect", "good")


def test_wrapping_folders_are_entered(tmp_path: Path) -> None:
    names = ("archive/Pets/cat/1.png", "archive/Pets/cat/old/2.png", "archive/Pets/dog/3.png")
    root = touch(tmp_path, *names, "other/x.txt")
    cats = {f"archive/Pets/cat/{name}.png": "cat" for name in ("1", "old/2")}
    assert labeled(root, list_split("train", root)) == {**cats, "archive/Pets/dog/3.png": "dog"}
    owner = list_split("train", root, folders="owner")
    assert owner.owner_names == ("archive",)
    touch(root, "archive/Pets/4.png")
    with pytest.raises(InputError, match=r"Pets holds 1 loose images beside the subfolders cat, dog; .*=none for no"):
        list_split("train", root)
    assert len(list_split("train", root, folders="none").files) == 4


def test_a_folder_between_owner_and_class_is_no_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in Office-31, whose domains have a folder images."""
    root = touch(tmp_path, *(f"{name}/images/{kind}/1.jpg" for name in ("amazon", "dslr") for kind in ("mug", "pen")))
    found = list_split("train", root, folders="owner/class")
    assert (found.classes, found.labels.tolist()) == (("mug", "pen"), [0, 1, 0, 1])
    assert (found.owner_names, found.owners.tolist()) == (("amazon", "dslr"), [0, 0, 1, 1])
    assert caplog.messages == [f"{root}: 4 JPEG files; 2 classes (mug, pen)"]


def test_classes_are_those_of_all_splits(tmp_path: Path) -> None:
    root = touch(tmp_path, "train/10/1.png", "train/2/1.png", "test/2/1.png", "test/0/1.png")
    assert classes_of(root) == [("0", "10", "2")] * 2  # in the order of text
    assert list_split("train", root).labels.tolist() == [1, 2]
    (root / "test" / "7").mkdir()
    assert classes_of(root) == [("0", "10", "2")] * 2


def test_spellings_of_a_class(tmp_path: Path) -> None:
    names = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    others = ("train/x/1.png", "test/x/1.png")
    root = touch(tmp_path / "accents", f"train/{names[0]}/1.png", f"test/{names[1]}/1.png", *others)
    assert classes_of(root) == [("café", "x")] * 2  # macOS decomposes accents
    for name in ("cat", "Cat "):
        root = touch(tmp_path / name, "train/Cat/1.png", "train/dog/1.png", f"test/{name}/1.png", "test/dog/1.png")
        with pytest.raises(InputError, match=r"spell a class differently .*; rename"):
            list_split("train", root)
    letters = touch(tmp_path / "letters", "train/A/1.png", "train/a/1.png", "test/a/1.png")
    assert classes_of(letters) == [("A", "a")] * 2


def test_splits_inside_classes_are_a_warning(tmp_path: Path) -> None:
    """As in MVTec AD, whose categories have splits."""
    root = touch(tmp_path, *(f"{name}/{split}/good/1.png" for name in ("bottle", "cable") for split in SPLITS))
    (warning,) = list_split("train", root).warnings
    assert "the folders of splits in bottle, cable are not used as splits, and test images are trained on" in warning
    assert list_split("train", root, split_folders=False).warnings == ()
    assert list_split("train", root / "cable").warnings == ()


def test_domains_behind_the_words_of_splits(tmp_path: Path) -> None:
    """As in CycleGAN's data sets: trainA/1.png is read as train/A/1.png."""
    root = touch(tmp_path / "data", *(f"{split}{name}/{n}.png" for split in SPLITS for name in "AB" for n in range(5)))
    assert classes_of(root) == [("A", "B")] * 2
    assert list_split("train", root).labels.tolist() == [0] * 5 + [1] * 5
    assert {Path(file).parent.name for file in list_split("test", root).files} == {"testA", "testB"}
    owners = list_split("train", root, folders="owner")
    assert (owners.owner_names, owners.owners.tolist()) == (("A", "B"), [0] * 5 + [1] * 5)
    with pytest.raises(InputError, match=r"/testA holds 5 loose images but dataset.folders=owner/class needs sub"):
        list_split("train", root, folders="owner/class")
    assert classes_of(touch(tmp_path / "one", "trainA/1.png", "testA/1.png")) == [(), ()]
    assert (
        classes_of(touch(tmp_path / "deep", *(f"{s}B/{name}/1.png" for s in SPLITS for name in "xy")))
        == [("x", "y")] * 2
    )
    assert classes_of(touch(tmp_path / "words", "VALE/1.png", "TESTS/1.png", "trainAB/1.png"))[1] is None


def test_masks_beside_images_are_a_warning(tmp_path: Path) -> None:
    assert list_split("train", touch(tmp_path / "nn", "imagesTr/1.jpg", "labelsTr/1.png")).warnings
    root = touch(tmp_path, "images/1.jpg", "Masks/1.png")
    (warning,) = list_split("train", root).warnings
    assert "images of Masks are trained on as a class; if these are masks, set dataset.path to the folder" in warning
    assert list_split("train", root / "images").warnings == list_split("train", root, folders="none").warnings == ()


def test_folders_of_unlabeled_images_are_no_classes(tmp_path: Path) -> None:
    root = touch(tmp_path, *(f"{split}/{name}/{split}.png" for split in SPLITS for name in ("cat", "dog")))
    touch(root, "unlabeled/a/1.png", "unlabeled/b/2.png")
    assert classes_of(root) == [("cat", "dog")] * 2
    unlabeled = list_split("unlabeled", root)
    assert (len(unlabeled.files), unlabeled.labels) == (2, None)
    touch(root, "unlabeled/cat/3.png")  # a class of the others
    assert classes_of(root) == [("a", "b", "cat", "dog")] * 2


@pytest.mark.parametrize("folders", [["cat", "dog", "unlabeled"], ["trainval", "test"]])
def test_a_split_among_classes_is_a_warning(tmp_path: Path, folders: list[str]) -> None:
    root = touch(tmp_path, *(f"{name}/1.png" for name in folders))
    (warning,) = list_split("train", root).warnings
    assert f"{folders[-1]} is trained on as a class; if it is a split, move the other folders into a" in warning
    for name in folders[:-1]:
        (root / "train").mkdir(exist_ok=True)
        (root / name).rename(root / "train" / name)
    assert list_split("train", root).warnings == ()
    assert len(list_split("train", root).files) == len(folders) - 1


def test_links_between_splits(tmp_path: Path) -> None:
    root = touch(tmp_path / "data", "train/a/1.png", "train/b/2.png", "test/b/3.png")
    (root / "test" / "a").symlink_to(root / "train" / "a")
    assert list_split("train", root).warnings == ()
    assert list_split("test", root).warnings == (
        f"1 of the 2 images of {root}/test are also in {root}/train, by links",
    )
    same = touch(tmp_path / "same", "train/a/1.png", "train/b/2.png")
    (same / "test").symlink_to(same / "train")
    with pytest.raises(InputError, match=r"2 of the 2 images of .*/test are also in .*/train, by links; give other"):
        list_split("test", same)
    split = touch(tmp_path / "split", "all/1.png", "all/2.png")
    for folder, name in (("train/a", "1"), ("train/b", "2"), ("test/a", "2"), ("test/b", "1")):
        (split / folder).mkdir(parents=True)
        (split / folder / f"{name}.png").symlink_to(split / "all" / f"{name}.png")
    (split / "all" / "3.png").touch()
    (split / "test" / "b" / "3.png").symlink_to(split / "all" / "3.png")
    assert [len(list_split(name, split, split_folders=True).files) for name in SPLITS] == [2, 3]
