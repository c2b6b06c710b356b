"""Folders as people have them: hidden files, links, other files."""

import os
from pathlib import Path

import pytest

from fedssl.datasets.listing import Listing, ending_of, list_files
from fedssl.errors import InputError
from tests.fedssl.datasets.made import touch


def link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


def images(root: Path) -> Listing:
    return list_files(root, (".png",))


def test_hidden_files_are_left_out_at_any_depth(tmp_path: Path) -> None:
    root = tmp_path / ".cache" / "@eaDir" / "data"
    touch(root, "cat/1.png", "cat/._1.png", "cat/.ipynb_checkpoints/1-checkpoint.png", "__MACOSX/cat/1.png")
    touch(root, "cat/@eaDir/1.png/thumb.png", "Thumbs.db", ".DS_Store", "cat/deep/.thumbnails/1.png", "#recycle/1.png")
    touch(root, "$RECYCLE.BIN/1.png", "lost+found/1.png", ".Trash-1000/1.png", "cat/lost+found.png", "#1/2.png")
    listing = images(root)
    assert listing.paths == ["#1/2.png", "cat/1.png", "cat/lost+found.png"]
    assert listing.ignored_kinds() == "hidden files and folders: 11"


def test_a_linked_folder_is_listed_once_under_its_own_path(tmp_path: Path) -> None:
    root = tmp_path / "data"
    touch(tmp_path, "disk/1.png", "disk/sub/2.png", "data/cat/3.png", "data/zoo/4.png")
    link(root / "cat" / "more", tmp_path / "disk")
    link(root / "zoo" / "again", tmp_path / "disk" / "sub")
    link(root / "ape", root / "zoo")  # the folder itself comes first, although its name is later
    listing = images(root)
    assert listing.paths == ["cat/3.png", "cat/more/1.png", "cat/more/sub/2.png", "zoo/4.png"]
    assert listing.repeated == ["ape/", "zoo/again/"]
    assert images(tmp_path / "data").paths == images(root).paths


def test_an_unreadable_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "cat/1.png", "private/2.png")
    scandir = os.scandir

    def refuse(folder: str) -> object:
        if folder.endswith("private"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything
    message = r"/private cannot be read \(Permission denied\); allow .*, or move it out of /"
    with pytest.raises(InputError, match=message):
        images(tmp_path)


def test_endings_with_two_parts() -> None:
    names = {"a.NII.GZ": ".nii.gz", "a.b.gz": ".gz", "a.nii": ".nii", "gz": "", ".gz": ""}
    assert {name: ending_of(name) for name in names} == names
