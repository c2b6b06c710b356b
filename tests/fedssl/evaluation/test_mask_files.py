"""Masks beside their images."""

from pathlib import Path

import pytest
import torch

from fedssl.errors import InputError
from fedssl.evaluation.segmentation import read_masks
from tests.fedssl.evaluation.test_segmentation import subject_of, write


def test_a_name_without_suffix_comes_first(tmp_path: Path):
    """An image may be called 0_mask, and further masks of unused images do not matter."""
    subject = write(tmp_path)
    expected = read_masks(subject.test, str(tmp_path / "masks"))
    for name in ("0_mask", "unused_mask", "unused_mask_1"):
        (tmp_path / "masks" / "test" / f"{name}.png").write_bytes((tmp_path / "masks/test/1.png").read_bytes())
    assert torch.equal(read_masks(subject.test, str(tmp_path / "masks")), expected)


def test_masks_beside_their_images_have_a_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = read_masks(write(tmp_path).test, str(tmp_path / "masks"))
    for mask in (tmp_path / "masks").rglob("*.png"):
        mask.rename(tmp_path / "images" / mask.parent.name / f"{mask.stem}_mask.png")
    monkeypatch.chdir(tmp_path)
    subject, where = subject_of(Path("images")), "images"
    assert len(subject.test.images) == 6
    assert torch.equal(read_masks(subject.test, where), expected)
    first = tmp_path / "images" / "test" / "0_mask.png"
    copy = first.with_name("0_Mask_1.png")
    copy.write_bytes(first.read_bytes())
    with pytest.raises(InputError, match=r"0_Mask_1.png, .*0_mask.png are masks of one image; merge them into one"):
        read_masks(subject.test, where)
    for file in (first, copy):
        file.unlink()
    with pytest.raises(InputError, match=r"has no mask for 1 of 6 images"):  # the image is not its own mask
        read_masks(subject.test, where)
