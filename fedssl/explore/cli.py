"""The command ``fedssl-explore``: one HTML page to look at images by the features of an encoder.

    fedssl-explore run=DIR images=PATH [out=explore.html] [embeddings=FILE] [dataset.key=value ...]
    fedssl-explore run=DIR [out=explore.html]

Without ``images`` the page has the images of the run's clients, in the encoder's size. ``embeddings`` is a file of
``fedssl-embed`` for the same images. The page needs no network and no server.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from fedssl.atomic_files import write_text
from fedssl.config.commands import run_with_overrides
from fedssl.config.literal import literal_values, path_of
from fedssl.config.overrides import did_you_mean, parse
from fedssl.config.targets import SEARCHPATH_KEY, search_folders
from fedssl.embedding.embedder import BACKENDS, Embedder, load_embedder
from fedssl.embedding.embeddings import list_for
from fedssl.errors import InputError
from fedssl.explore.clusters import MAX_CLUSTERS
from fedssl.explore.images import Images, PathImages, collect
from fedssl.explore.page import Gallery, make_page
from fedssl.explore.projection import check_method
from fedssl.explore.thumbnails import band_numbers
from fedssl.safe_io import sanitize

USAGE = (
    "usage: fedssl-explore run=DIR [images=PATH] [out=explore.html] [embeddings=FILE] [backend=torch|onnx]\n"
    "       [device=auto|cpu|cuda|mps] [projection=auto|umap|tsne|pca] [clusters=auto|NUMBER] [threshold=0.95]\n"
    "       [columns=NAME,NAME] [bands=1,2,3] [limit=10000] [dataset.key=value ...]\n"
    "       fedssl-explore encoder=FILE images=PATH ...\n"
    "       Without images: those of the run's clients. --config-dir FOLDER: settings of your own encoder"
)
_DEFAULTS = {
    "run": "",
    "encoder": "",
    "images": "",
    "out": "explore.html",
    "embeddings": "",
    "backend": "torch",
    "device": "auto",
    "projection": "auto",
    "clusters": "auto",
    "threshold": "0.95",
    "columns": "",
    "bands": "",
    "limit": "10000",
}
_DATA_SET = "dataset."
MAX_LIMIT = 50_000  # images of a page, which a browser displays

log = logging.getLogger("fedssl")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command, validated."""

    texts: Mapping[str, str]
    out: Path
    clusters: int | None
    threshold: float
    limit: int
    columns: Sequence[str]
    settings: Mapping[str, Any] = field(default_factory=dict)  # of dataset=folder

    @property
    def source(self) -> Path:
        """The run folder, or the file of the encoder."""
        return path_of(self.texts["run"] or self.texts["encoder"])


def main() -> int:
    """Entry point; returns the exit status, see `run_command`."""
    return run_with_overrides("fedssl-explore", USAGE, run)


def run(overrides: Sequence[str]) -> str:
    """Write the page by the overrides, and return the text to print."""
    options = read_options(overrides)
    texts, folders = options.texts, search_folders(overrides)
    embedder = load_embedder(options.source, device=texts["device"], backend=texts["backend"], folders=folders)
    bands = band_numbers(texts["bands"] or None, embedder.channels)
    images, warnings = _images(options, embedder, overrides)
    known = None
    if texts["embeddings"]:
        from fedssl.explore.embeddings_file import read_features  # here: it imports pyarrow, which needs memory

        assert isinstance(images, PathImages)  # `_check_sources`
        known = read_features(path_of(texts["embeddings"]), images, embedder)
    total = len(images)
    if total > options.limit:
        warnings.append(
            f"{options.limit:,} of {total:,} images are on this page, drawn at random; duplicates and outliers among "
            f"the others are missing; raise limit, up to {MAX_LIMIT:,}."
        )
        log.warning("%s", warnings[-1])
        images = images.sampled(options.limit)
    if (options.clusters or 0) > len(images):
        raise InputError(f"clusters={options.clusters} but there are {len(images):,} images; lower it, or set auto")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=len(images))
        found = collect(
            images,
            embedder,
            known=known,
            bands=bands,
            further=options.columns,
            progress=lambda done: bar.update(task, completed=done),
        )
    gallery = Gallery(
        source=images.name,
        encoder=options.source.absolute().name,
        images=found,
        size=embedder.size,
        warnings=[*warnings, *filter(None, [found.warning])],
        notes=_notes(embedder, bands),
    )
    page = make_page(gallery, projection=texts["projection"], clusters=options.clusters, threshold=options.threshold)
    write_text(options.out, page)
    return f"written to {options.out}: {len(found.names):,} images, {len(page.encode()) / 1e6:.1f} MB"


def _images(options: Options, embedder: Embedder, overrides: Sequence[str]) -> tuple[Images, list[str]]:
    """Return the images, and the warnings about them that the page repeats."""
    if options.texts["images"]:
        path = path_of(options.texts["images"])
        found = list_for(embedder, path, options.settings)
        name = path.absolute().name
        # A page that is shared has no path of this machine.
        return PathImages(name, found), [sanitize(line.replace(str(found.root), name)) for line in found.warnings]
    from fedssl.explore.run_images import load_run_images  # here: it imports torch

    searched = [override for override in overrides if override.startswith(SEARCHPATH_KEY)]
    return load_run_images(options.source, channels=embedder.channels, size=embedder.size, overrides=searched), []


def _notes(embedder: Embedder, bands: Sequence[int]) -> list[str]:
    """Return what the page states about thumbnails and privacy."""
    channels = (
        f"channel {bands[0] + 1}" if len(bands) == 1 else f"channels {', '.join(str(band + 1) for band in bands)}"
    )
    of = f"{channels} of {embedder.channels}" if embedder.channels not in (1, 3) else "all channels"
    window = embedder.pixels.get("window")
    limits = "" if window is None else f", in the window from {window[0]:g} to {window[1]:g}"
    return [
        f"Thumbnails: the centered square of each image, {of}{limits}, as the encoder reads it.",
        "The page holds the thumbnails and the names of the images; share it as you would share these.",
    ]


def read_options(overrides: Sequence[str]) -> Options:
    """Read and validate the options; raises `InputError`."""
    texts, others = dict(_DEFAULTS), list[str]()
    for override in overrides:
        key, _, value = override.partition("=")
        if key in texts:
            if not value:
                raise InputError(f"{override} has no value; write {key}=... or leave it out")
            texts[key] = value
        elif key.startswith(_DATA_SET):
            others.append(override)
        elif key != SEARCHPATH_KEY:
            raise InputError(
                f"{override} has no effect on fedssl-explore{did_you_mean(key, _DEFAULTS)}; allowed are "
                f"{', '.join(_DEFAULTS)} and settings of dataset=folder"
            )
    _check_sources(texts, others)
    check_method(texts["projection"])
    settings = {each.key_or_group.removeprefix(_DATA_SET): each.value() for each in parse(literal_values(others))}
    out = path_of(texts["out"])
    _check_out(out)
    clusters = None if texts["clusters"] == "auto" else int(_number(texts, "clusters", 1, MAX_CLUSTERS, whole=True))
    return Options(
        texts=texts,
        out=out,
        clusters=clusters,
        threshold=_number(texts, "threshold", 0, 1),
        limit=int(_number(texts, "limit", 1, MAX_LIMIT, whole=True)),
        columns=[name.strip() for name in texts["columns"].strip("[]").split(",") if name.strip()],
        settings=settings,
    )


def _check_sources(texts: Mapping[str, str], others: Sequence[str]) -> None:
    if bool(texts["run"]) == bool(texts["encoder"]):
        raise InputError("give either run=DIR or encoder=FILE; write fedssl-explore run=DIR images=PATH")
    if texts["backend"] not in BACKENDS:
        raise InputError(f"backend={texts['backend']} does not exist; choose one of {', '.join(BACKENDS)}")
    for key in ("encoder", "embeddings"):
        if texts[key] and not texts["images"]:
            raise InputError(f"{key}= needs the images; add images=PATH")
    if others and not texts["images"]:
        raise InputError(f"{others[0]} has no effect on the images of the run's clients; add images=PATH, or remove it")


def _check_out(out: Path) -> None:
    if out.suffix not in (".html", ".htm"):
        raise InputError(f"out={out} is no HTML file; choose a name that ends in .html")
    if not out.absolute().parent.is_dir():
        raise InputError(f"out={out} is in a folder that does not exist; create {out.parent} first")


def _number(texts: Mapping[str, str], key: str, low: float, high: float, *, whole: bool = False) -> float:
    try:
        value = float(texts[key])
    except ValueError:
        value = math.nan
    if not low <= value <= high or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        auto = ", or auto" if _DEFAULTS[key] == "auto" else ""
        raise InputError(f"{key}={texts[key]} must be {kind} from {low:g} to {high:,g}{auto}")
    return value
