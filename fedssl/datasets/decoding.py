"""Encoded pictures to one uint8 tensor: any channels and any size become those of the data set."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from PIL import Image, ImageOps

from fedssl.errors import InputError
from fedssl.machine.threads import available_cores

THREADS = 8  # most threads that decode


def to_array(image: Image.Image, *, channels: int, size: int) -> np.ndarray:
    """Bring the pixels of a picture into the data set's form.

    Grey becomes RGB by repetition, RGB becomes grey by the luma of ITU-R 601, transparency is dropped, 16 bits become
    the upper 8. Another size is brought to ``size`` by scaling the shorter side and cropping the centre.

    Parameters
    ----------
    image : PIL.Image.Image
        Any mode but 32-bit integers and floats, whose range is unknown.
    channels : {1, 3}
        Grey or RGB.
    size : int
        Height and width of the result in pixels.

    Returns
    -------
    ndarray
        uint8, ``(channels, size, size)``.

    Raises
    ------
    InputError
        If the channels cannot be converted.
    """
    if image.mode in ("I", "F"):
        raise InputError(
            f"wrong channels: a picture has 32-bit values (mode {image.mode}) of unknown range; "
            "save it as grey, RGB, RGBA or palette with 8 or 16 bits"
        )
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    mode = "L" if channels == 1 else "RGB"
    if image.mode != mode:
        image = image.convert(mode)
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(size, size, channels).transpose(2, 0, 1)


def read_picture(source: bytes | Path, *, channels: int, size: int) -> np.ndarray:
    """Decode one picture, upright by its EXIF orientation; see `to_array` for the result."""
    with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as image:
        # A JPEG much larger than needed is decoded at 1/2, 1/4 or 1/8 of its size: a phone's picture in a fifth of
        # the time. Twice the target leaves the filter enough to work on. Other formats ignore it.
        image.draft(None, (2 * size, 2 * size))
        ImageOps.exif_transpose(image, in_place=True)
        return to_array(image, channels=channels, size=size)


def decode(
    batches: Iterable[Sequence[bytes | Path]], *, count: int, channels: int, size: int
) -> tuple[torch.Tensor, dict[int, str]]:
    """Decode all pictures with a pool of threads that write into one tensor.

    Threads fetch the next batch only when they are free, so that no more than one batch per thread waits in memory.

    Parameters
    ----------
    batches : iterable of sequences of bytes or Path
        Encoded pictures or files, ``count`` in all.
    count, channels, size : int
        Shape of the result.

    Returns
    -------
    images : Tensor
        uint8, ``(count, channels, size, size)``.
    unreadable : dict
        Position of every picture that could not be decoded, with the reason; its pixels are arbitrary.

    Raises
    ------
    InputError
        If the channels of a picture cannot be converted.
    """
    images = torch.empty((count, channels, size, size), dtype=torch.uint8)
    pixels = images.numpy()
    unreadable: dict[int, str] = {}
    numbered = _numbered(batches)
    lock = Lock()

    def work() -> None:
        while True:
            with lock:
                start, batch = next(numbered, (0, None))
            if batch is None:
                return
            for position, source in enumerate(batch, start):
                try:
                    pixels[position] = read_picture(source, channels=channels, size=size)
                except InputError as error:
                    name = source if isinstance(source, Path) else f"picture {position}"
                    raise InputError(f"{name}: {error}") from error
                except Exception as error:  # a damaged file can raise almost anything inside the decoder of its format
                    unreadable[position] = f"{type(error).__name__}: {error}"

    threads = min(THREADS, available_cores())
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
    return images, dict(sorted(unreadable.items()))


def _numbered(batches: Iterable[Sequence[bytes | Path]]) -> Iterator[tuple[int, Sequence[bytes | Path]]]:
    """Each batch with the position of its first picture."""
    start = 0
    for batch in batches:
        yield start, batch
        start += len(batch)
