"""Images in a tensor, in a mapped file and encoded: the same pixels, read ahead in order and within bounds."""

import mmap
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedssl.datasets import images
from fedssl.datasets.decoding import Decoding
from fedssl.datasets.images import EncodedImages, ImageSource, MappedImages, SelectedImages, TensorImages
from fedssl.errors import InputError
from tests.fedssl.datasets.made import png

COUNT, SIZE = 40, 45  # an image of 3 x 45 x 45 bytes is no multiple of a page


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randint(256, (COUNT, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["tensor", "mapped", "encoded"])
def source(request, pixels, tmp_path) -> ImageSource:
    if request.param == "tensor":
        return TensorImages(pixels)
    if request.param == "mapped":
        file = tmp_path / "pixels"
        file.write_bytes(pixels.numpy().tobytes())
        with file.open("rb") as stream:
            return MappedImages(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), tuple(pixels.shape))
    return encoded(pixels)


def encoded(pixels: torch.Tensor) -> EncodedImages:
    """Every second record is damaged, and left out."""
    pngs = [png(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in pixels]
    records = [record for content in pngs for record in (b"damaged", content)]
    return EncodedImages(records, 2 * np.arange(COUNT) + 1, Decoding(channels=3, size=SIZE, dtype="uint8"))


@pytest.mark.parametrize("kind", ["mapped", "encoded"])
@pytest.mark.parametrize(("room", "ahead"), [(0, 1), (3, 3), (100, images.AHEAD)])
def test_few_batches_are_read_ahead(pixels, tmp_path, monkeypatch, kind, room, ahead):
    """``room`` is that of batches of five images. When a batch arrives, that many further ones have been requested."""
    monkeypatch.setattr(images, "AHEAD_BYTES", room * 5 * 3 * SIZE**2)
    requested = []

    def batches():
        for rows in torch.arange(COUNT).split(5):
            requested.append(rows)
            yield rows

    if kind == "encoded":
        source: ImageSource = encoded(pixels)
    else:
        (tmp_path / "pixels").write_bytes(pixels.numpy().tobytes())
        with (tmp_path / "pixels").open("rb") as stream:
            source = MappedImages(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), tuple(pixels.shape))
    for number, found in enumerate(source.prefetch(batches())):
        assert len(requested) == min(number + 1 + ahead, 8)
        assert torch.equal(found, pixels[5 * number : 5 * number + 5])


def test_batches_that_nobody_takes_are_not_decoded(pixels, monkeypatch):
    waiting: list[Future[None]] = []

    class Pool:
        def submit(self, task, *arguments):
            waiting.append(Future())
            if len(waiting) <= 2:  # the first batch of nine, eight of them in the first task
                task(*arguments)
                waiting[-1].set_result(None)
            return waiting[-1]

    monkeypatch.setattr(images, "_pool", Pool)
    batches = encoded(pixels).prefetch(torch.arange(COUNT).split(9))
    assert torch.equal(next(batches), pixels[:9])
    batches.close()
    assert len(waiting) == 9  # 9, 9, 9, 9 and 4 images
    assert [future.cancelled() for future in waiting] == [False] * 2 + [True] * 7


def test_a_changed_image_ends_the_run_with_one_sentence(pixels):
    source = encoded(pixels)
    source._records[7] = b"changed"
    assert torch.equal(source[:3], pixels[:3])
    with pytest.raises(InputError, match=r"image 7 of the data set was readable and is no longer \(it is no image of"):
        list(source.prefetch([torch.tensor([3])]))


@pytest.mark.parametrize(("least", "advised"), [(3 * SIZE**2, 2), (3 * SIZE**2 + 1, 0)])
def test_the_read_ahead_of_a_mapped_file_covers_its_rows(pixels, monkeypatch, least, advised):
    """Whole pages from that of the first byte to that of the last one of each image, unless images are small."""
    monkeypatch.setattr(images, "READ_AHEAD_BYTES", least)
    size, calls = 3 * SIZE**2, []
    source = object.__new__(MappedImages)
    source.shape = tuple(pixels.shape)

    class Mapped:
        def madvise(self, option, start, length):
            calls.append((option, start, length))

    source._mapped = Mapped()
    source._read_ahead(torch.tensor([5, 0]))
    assert len(calls) == advised
    for row, (option, start, length) in zip((5, 0), calls, strict=False):
        assert option == mmap.MADV_WILLNEED
        assert start % mmap.PAGESIZE == 0
        assert 0 <= row * size - start < mmap.PAGESIZE
        assert start + length == (row + 1) * size


IMAGES = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 3, 2, 2).contiguous()
ROWS = torch.tensor([7, 2, 2, 9])
CPU = torch.device("cpu")


class Doubled(SelectedImages):
    """Images plus ten times the row of the source."""

    def of(self, source: ImageSource, rows: Tensor) -> "Doubled":
        return Doubled(source, rows)

    def changed(self, images: Tensor, rows: Tensor) -> Tensor:
        return images + 10 * rows.view(-1, 1, 1, 1).to(torch.uint8)


def values(images: Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(("kind", "factor"), [(SelectedImages, 1), (Doubled, 11)])
def test_every_access_returns_the_rows_of_the_source(kind, factor):
    chosen = kind(TensorImages(IMAGES), ROWS)
    assert (len(chosen), chosen.shape, chosen.dtype) == (4, (4, 3, 2, 2), torch.uint8)
    expected = [factor * row for row in (7, 2, 2, 9)]
    assert values(chosen[:]) == expected
    assert values(chosen[1:3]) == expected[1:3]
    assert values(chosen[torch.tensor([3, 0])]) == [expected[3], expected[0]]
    assert [values(batch) for batch in chosen.chunks(3)] == [expected[:3], expected[3:]]
    for part in (chosen.subset(torch.tensor([3, 1])), chosen.to(CPU).subset(torch.tensor([3, 1]))):
        assert isinstance(part, kind)
        assert values(part.place(CPU)[:]) == [expected[3], expected[1]]
