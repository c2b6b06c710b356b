"""The page of views: its pictures by hand, images of any channels and dtype, masks, and bad input."""

import io
import re
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.augmentation import Augmentation
from fedssl.augmented_views.cli import Display, run, view_values
from fedssl.errors import InputError
from fedssl.views import GLOBAL, Mask, View
from tests.fedssl.report.test_html_page import HOSTILE, Elements

PLAIN = Augmentation(size=4, mean=[0.5], std=[0.25], views=[{}])


def pixels(data: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(b64decode(data))))


def pictures(page: str) -> list[np.ndarray]:
    return [pixels(data) for data in re.findall('data:image/png;base64,([^"]*)', page)]


def test_pictures_by_hand():
    gray = torch.tensor([[[0, 255], [128, 64]]], dtype=torch.uint8)
    display = Display.of(gray[None], None)
    assert (display, display.text) == (Display((0,)), "")
    assert pixels(display.png(gray / 255)).tolist() == gray[0].tolist()
    rgb = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2)
    assert pixels(Display.of(rgb, None).png(rgb[0] / 255)).tolist() == rgb[0].permute(1, 2, 0).tolist()
    # 101 values 0, 0.01, ..., 1 of each band: percentiles 1 and 99 are 0.01 and 0.99.
    many = (torch.arange(101) / 100).view(1, 1, 1, 101).repeat(1, 5, 1, 1)
    display = Display.of(many, (3, 2, 1))
    assert (display.low, display.high) == (pytest.approx(0.01), pytest.approx(0.99))
    assert display.text == (
        "red, green and blue are channels 4, 3, 2; values of 0.01 to 0.99 (of 0 to 1) are shown from black to white"
    )
    assert pixels(display.png(many[0]))[0, [0, 50, 100], 0].tolist() == [0, 128, 255]  # (0.5 - 0.01) / 0.98 x 255
    assert Display.of(many[:, :2], None).bands == (0, 1, 1)
    assert Display.of(torch.zeros(1, 1, 2, 2), None).high == 1  # all values are equal
    assert pixels(Display((0,)).png(torch.zeros(1, 600, 300))).shape == (256, 128)


def test_views_are_shown_as_the_images_they_come_from():
    images = torch.randint(0, 256, (3, 1, 4, 4), dtype=torch.uint8)
    (view,) = PLAIN(images, torch.Generator().manual_seed(0)).views
    assert torch.allclose(view_values(view, PLAIN, patch=None), images / 255, atol=1e-5)


def test_patches_that_a_mask_hides_are_nearly_gray():
    hidden = torch.tensor([[False, True, False, False]])  # of four patches with 2x2 pixels, the upper right one
    white = View((torch.ones(1, 1, 4, 4) - 0.5) / 0.25, GLOBAL, Mask(hidden))
    shown = view_values(white, PLAIN, patch=2)[0, 0]
    expected = torch.ones(4, 4)
    expected[:2, 2:] = 1 - 0.85 * 0.5
    assert torch.allclose(shown, expected)


def test_a_page_has_originals_and_all_views(tmp_path: Path):
    out = tmp_path / "a.html"
    text = run([f"out={out}", "images=4", "draws=2"])
    assert text == f"written to {out}: 2 x 2 views of 4 images"
    page = out.read_text()
    assert len(pictures(page)) == 4 * (1 + 2 * 2)
    assert {picture.shape for picture in pictures(page)} == {(8, 8)}
    assert "crop_scale=[0.25, 1.0], brightness=0.4" in page
    assert "flip_prob" not in page  # is off
    run([f"out={out}", "images=4", "draws=2"])
    assert out.read_text() == page  # the same settings give the same page
    run([f"out={out}", "images=4", "draws=2", "seed=1"])
    assert out.read_text() != page


def test_masks_and_local_views_have_pictures(tmp_path: Path):
    out = tmp_path / "a.html"
    run([f"out={out}", "images=1", "draws=1", "experiment=mae"])
    assert "Patches that a mask hides from the encoder are gray." in out.read_text()
    assert "random mask" in out.read_text()
    run([f"out={out}", "images=1", "draws=1", "experiment=dino", "augmentation=digits_multi_crop"])
    shapes = [picture.shape for picture in pictures(out.read_text())]
    assert shapes[:3] == [(8, 8)] * 3
    assert set(shapes[3:]) == {(4, 4)}
    assert "<td>3, 4, 5, 6</td><td>local, 4x4 pixels</td>" in out.read_text()


def test_images_of_many_bands_and_hostile_names(tmp_path: Path):
    folder = tmp_path / "photos" / HOSTILE.replace("/", "")
    folder.mkdir(parents=True)
    for number in range(5):
        values = np.random.default_rng(number).integers(0, 3000, (8, 8, 13))
        np.save(folder / f"{number}.npy", values.astype(np.uint16))
    out = tmp_path / "a.html"
    words = ["dataset=folder", f"dataset.path={tmp_path / 'photos'}", "dataset.channels=13", "dataset.size=8"]
    run([f"out={out}", *words, "augmentation=satellite", "bands=4,3,2"])
    page = out.read_text()
    assert "13 channel(s), uint16" in page
    assert "red, green and blue are channels 4, 3, 2" in page
    assert "are shown from black to white" in page
    assert "so that they have hardly any contrast; set dataset.window=" in page
    assert {picture.shape for picture in pictures(page)} == {(8, 8, 3)}
    assert max(picture.max() for picture in pictures(page)) == 255
    elements = Elements(page)
    assert not {tag for tag, _ in elements.found} & {"script", "svg"}
    assert all(attributes["src"].startswith("data:") for tag, attributes in elements.found if tag == "img")
    assert str(tmp_path) not in page
    assert "0.npy" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out=views.txt"], "out=views.txt does not end in .html"),
        (["out=none/views.html"], "in a folder that does not exist; create none"),
        (["images=0"], "images=0 must be a whole number from 1 to 2,000"),
        (["images=900", "draws=9"], "lower images or draws"),
        (["bands=0,1,2"], "bands=0,1,2 must be one or three channels from 1 to 1, such as bands=1,1,1"),
        (["experiment=mae", "augmentation=digits"], "MAE trains on .*; set augmentation="),
        (["dataset=folder", "dataset.path=none"], "none"),
        (["strategy=fedavg,eua"], "sweeps over values"),
    ],
)
def test_bad_input_is_refused_and_writes_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        run(words)
    assert not [*tmp_path.iterdir()]
