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
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from fedssl import __version__
from fedssl.config.commands import run_with_overrides
from fedssl.config.literal import literal_values, path_of
from fedssl.config.overrides import did_you_mean, parse
from fedssl.config.targets import SEARCHPATH_KEY, search_folders
from fedssl.embedding.embedder import BACKENDS, Embedder, load_embedder
from fedssl.embedding.embeddings import check_readable, list_for, log
from fedssl.embedding.formats import FORMATS, Table, check_out
from fedssl.embedding.image_list import ImageList
from fedssl.embedding.partial import Partial, open_partial, partial_bytes, remove_partial
from fedssl.errors import InputError
from fedssl.machine.memory import gigabytes
from fedssl.machine.process import OPENMP_ENV
from fedssl.safe_io import sanitize

USAGE = (
    "usage: fedssl-embed run=DIR images=PATH out=FILE [backend=torch|onnx] [device=auto|cpu|cuda|mps]\n"
    "       [skip_unreadable=true] [dataset.key=value ...]\n"
    "       fedssl-embed encoder=FILE images=PATH out=FILE ...\n"
    f"       FILE ends in {', '.join(FORMATS)}; the same command continues an interrupted one\n"
    "       --config-dir FOLDER: folder with the settings of your own encoder"
)
_KEYS = ("run", "encoder", "images", "out", "backend", "device", "skip_unreadable")
_DATA_SET = "dataset."


def main() -> int:
    """Entry point; returns the exit status, see `run_command`."""
    for name, value in OPENMP_ENV.items():  # torch is not imported yet
        os.environ.setdefault(name, value)
    return run_with_overrides("fedssl-embed", USAGE, run)


def run(overrides: Sequence[str]) -> str:
    """Write the file of features by the overrides, and return the text to print."""
    options, settings = _parsed(overrides)
    source, images, out = (path_of(options[key]) for key in ("run" if "run" in options else "encoder", "images", "out"))
    check_out(out, images)
    folders = search_folders(overrides)
    backend, device = options.get("backend", "torch"), options.get("device", "auto")
    embedder = load_embedder(source, device=device, backend=backend, folders=folders)
    found = list_for(embedder, images, settings)
    start, skip = time.monotonic(), options.get("skip_unreadable") == "true"
    count, computed = write_features(embedder, found, out, skip_unreadable=skip)
    speed = f", {computed / max(time.monotonic() - start, 1e-9):,.0f} images/s" if computed else ""
    return f"written to {out}: {count:,} images, {embedder.dimension} dimensions{speed}"


def _parsed(overrides: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the options, and the settings of dataset=folder."""
    options, others = dict[str, str](), list[str]()
    for override in overrides:
        key, _, value = override.partition("=")
        if key in _KEYS:
            options[key] = value
        elif key != SEARCHPATH_KEY:
            others.append(override)
            if not key.startswith(_DATA_SET):
                raise InputError(
                    f"{override} has no effect on fedssl-embed{did_you_mean(key, _KEYS)}; allowed are "
                    f"{', '.join(_KEYS)} and settings of dataset=folder"
                )
    missing = [key for key in ("images", "out") if not options.get(key)]
    if missing or ("run" in options) == ("encoder" in options):
        what = f"{missing[0]}= is missing" if missing else "give either run=DIR or encoder=FILE"
        raise InputError(f"{what}; write fedssl-embed run=DIR images=PATH out=FILE")
    for key, allowed in (("skip_unreadable", ("true", "false")), ("backend", tuple(BACKENDS))):
        if options.get(key, allowed[0]) not in allowed:
            raise InputError(f"{key}={options[key]} is not valid; choose one of {', '.join(allowed)}")
    parsed = parse(literal_values(others))
    return options, {override.key_or_group.removeprefix(_DATA_SET): override.value() for override in parsed}


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
        before = partial.done
        try:
            _compute(embedder, images, partial, skip_unreadable=skip_unreadable)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f" after {partial.done:,} of {len(images):,}; the same command continues") from stop
        check_readable(images, partial.unreadable, skip=skip_unreadable)
        partial.save()
        _, write = FORMATS[out.suffix]
        write(Table(images, partial, about), out)
        count, computed = partial.count, partial.done - before
    remove_partial(out)
    return count, computed


def _compute(embedder: Embedder, images: ImageList, partial: Partial, *, skip_unreadable: bool) -> None:
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=len(images), completed=partial.done)
        for block in images.blocks(embedder.batch_size, start=partial.done):
            partial.add(block, embedder(block.images))
            bar.update(task, completed=block.end)
            if not partial.count and not skip_unreadable:  # such as all images of a wrong kind: at once
                check_readable(images, partial.unreadable, skip=False)


def _check_disk(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise InputError(
            f"{sanitize(out.parent)} has no room for the features: they need {gigabytes(needed)} while they are "
            f"written, and {gigabytes(free)} are free; free disk space, or choose another disk with out="
        )
