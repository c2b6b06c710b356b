"""The command ``fedssl-embed``: compute the features of images by the encoder of a run, and write them to a file.

    fedssl-embed run=DIR images=PATH out=FILE [backend=torch|onnx] [device=auto] [skip_unreadable=true]
    fedssl-embed encoder=FILE images=PATH out=FILE [dataset.key=value ...]

The ending of ``out`` is its format: ``.parquet``, ``.npy`` and ``.faiss`` (with names in ``.csv``), or ``.lance``.
The same command continues after an interruption.
"""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedssl import __version__
from fedssl.config.commands import flag_of, read_options, run_with_overrides, source_of
from fedssl.config.literal import path_of
from fedssl.config.targets import search_folders
from fedssl.embedding.embedder import MAX_BATCH, Embedder, load_embedder
from fedssl.embedding.embeddings import check_readable, embedded_blocks, list_for
from fedssl.embedding.formats import FORMATS, Table, check_out
from fedssl.embedding.image_list import ImageList
from fedssl.embedding.partial import Partial, open_partial, partial_bytes, remove_partial
from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.machine.memory import gigabytes
from fedssl.machine.process import OPENMP_ENV

USAGE = (
    "usage: fedssl-embed run=DIR images=PATH out=FILE [backend=torch|onnx] [device=auto|cpu|cuda|mps]\n"
    "       [skip_unreadable=true] [dataset.key=value ...]\n"
    "       fedssl-embed encoder=FILE images=PATH out=FILE ...\n"
    f"       FILE ends in {', '.join(FORMATS)}; the same command continues an interrupted one\n"
    "       --config-dir FOLDER: folder with the settings of your own encoder"
)
_KEYS = ("run", "encoder", "images", "out", "backend", "device", "skip_unreadable")


def main() -> int:
    """Run the command, and return its exit status, see `run_command`."""
    for name, value in OPENMP_ENV.items():  # torch is not imported yet
        os.environ.setdefault(name, value)
    return run_with_overrides("fedssl-embed", USAGE, run)


def run(overrides: Sequence[str]) -> str:
    """Write the file of features by the overrides, and return the text to print."""
    options, settings = read_options("fedssl-embed", overrides, keys=_KEYS)
    source = source_of(options)
    for key in ("images", "out"):
        if key not in options:
            raise InputError(f"{key}= is missing; write fedssl-embed run=DIR images=PATH out=FILE")
    images, out = path_of(options["images"]), path_of(options["out"])
    check_out(out, images)
    skip = flag_of("skip_unreadable", options.get("skip_unreadable", "false"))
    embedder = load_embedder(
        source,
        device=options.get("device", "auto"),
        backend=options.get("backend", "torch"),
        folders=search_folders(overrides),
    )
    found = list_for(embedder, images, settings)
    start = time.monotonic()
    count, computed = write_features(embedder, found, out, skip_unreadable=skip)
    speed = f", {computed / max(time.monotonic() - start, 1e-9):,.0f} images/s" if computed else ""
    return f"written to {out}: {count:,} images, {embedder.dimension} dimensions{speed}"


def write_features(embedder: Embedder, images: ImageList, out: Path, *, skip_unreadable: bool) -> tuple[int, int]:
    """Write the features of images to a new file; return their number, and how many were computed by this call.

    An interruption leaves a folder ``.NAME.partial``, from which the next call continues. Raise an `InputError` for
    unreadable images, unless they are to be skipped, or if the disk is too small.
    """
    about = {"encoder": embedder.digest, "images": images.digest(), "version": __version__}
    _check_disk(out, 2 * 4 * embedder.dimension * len(images) - partial_bytes(out))
    with open_partial(out, about, embedder.dimension) as partial:
        if partial.is_changed:
            log.warning("the images, their settings or the encoder have changed: all images are embedded again")
        _retry(images, partial)
        before = partial.done
        try:
            _compute(embedder, images, partial, skip_unreadable=skip_unreadable)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f" after {partial.done:,} of {len(images):,}; the same command continues") from stop
        check_readable(images, partial.unreadable, skip=skip_unreadable)
        partial.save()
        _, write = FORMATS[out.suffix.lower()]
        write(Table(images, partial, about), out)
        count, computed = partial.count, partial.done - before
    remove_partial(out)
    return count, computed


def _retry(images: ImageList, partial: Partial) -> None:
    """Continue from the first image that was unreadable and no longer is, for example on a share that was offline."""
    rows = np.array(sorted(partial.unreadable), dtype=np.int64)
    if len(rows):
        readable = (block.rows for block in images.at(rows).blocks(MAX_BATCH) if len(block.rows))
        partial.rewind(next((int(rows[found[0]]) for found in readable), partial.done))


def _compute(embedder: Embedder, images: ImageList, partial: Partial, *, skip_unreadable: bool) -> None:
    for block, features in embedded_blocks(embedder, images, start=partial.done):
        partial.add(block, features)
        if not partial.count and not skip_unreadable:  # such as all images of a wrong kind: at once
            check_readable(images, partial.unreadable, skip=False)


def _check_disk(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise InputError(
            f"{out.parent} has no room for the features: they need {gigabytes(needed)} while they are "
            f"written, and {gigabytes(free)} are free; free disk space, or choose another disk with out="
        )
