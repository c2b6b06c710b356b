"""The command ``fedssl-explore``: one HTML page to look at images by the features of an encoder.

    fedssl-explore run=DIR images=PATH [out=explore.html] [embeddings=FILE] [dataset.key=value ...]
    fedssl-explore run=DIR [out=explore.html]

Without ``images`` the page has the images of the run's clients, in the encoder's size. ``embeddings`` is a file of
``fedssl-embed`` for the same images. The page needs no network and no server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedssl.atomic_files import write_text
from fedssl.config.commands import (
    DATA_SET,
    bands_of,
    check_output,
    number_of,
    read_options,
    run_with_overrides,
    source_of,
)
from fedssl.config.literal import path_of
from fedssl.config.targets import SEARCHPATH_KEY, search_folders
from fedssl.embedding.embedder import Embedder, load_embedder
from fedssl.embedding.embeddings import list_for
from fedssl.errors import InputError, sanitize
from fedssl.explore.clusters import MAX_CLUSTERS
from fedssl.explore.images import Images, PathImages, collect
from fedssl.explore.page import Gallery, make_page
from fedssl.explore.projection import check_method
from fedssl.logs import log

USAGE = (
    "usage: fedssl-explore run=DIR [images=PATH] [out=explore.html] [embeddings=FILE] [backend=torch|onnx]\n"
    "       [device=auto|cpu|cuda|mps] [projection=auto|umap|tsne|pca] [clusters=auto|NUMBER] [threshold=0.95]\n"
    "       [columns=NAME,NAME] [bands=1,2,3] [limit=10000] [dataset.key=value ...]\n"
    "       fedssl-explore encoder=FILE images=PATH ...\n"
    "       Without images: those of the run's clients (dataset.path=PATH, if moved).\n"
    "       --config-dir FOLDER: settings of your own encoder"
)
_DEFAULTS = {
    **dict.fromkeys(("run", "encoder", "images", "embeddings", "columns", "bands"), ""),
    **dict.fromkeys(("device", "projection", "clusters"), "auto"),
    "backend": "torch",
    "out": "explore.html",
    "threshold": "0.95",
    "limit": "10000",
}
_PATH_KEY = "dataset.path"
MAX_LIMIT = 50_000  # images of a page, which a browser displays


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command, validated."""

    texts: Mapping[str, str]
    source: Path  # folder of a run, or file of an encoder
    out: Path
    clusters: int | None
    threshold: float
    limit: int
    columns: Sequence[str]
    settings: Mapping[str, Any]  # of dataset=folder


def main() -> int:
    """Run the command, and return its exit status, see `run_command`."""
    return run_with_overrides("fedssl-explore", USAGE, run)


def run(overrides: Sequence[str]) -> str:
    """Write the page by the overrides, and return the text to print."""
    options = explore_options(overrides)
    texts, folders = options.texts, search_folders(overrides)
    embedder = load_embedder(options.source, device=texts["device"], backend=texts["backend"], folders=folders)
    first = "1,2,3" if embedder.channels >= 3 else "1"
    bands = bands_of(texts["bands"] or first, embedder.channels)
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
    found = collect(images, embedder, known=known, bands=bands, further=options.columns)
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

    kept = [override for override in overrides if override.partition("=")[0] in (SEARCHPATH_KEY, _PATH_KEY)]
    return load_run_images(options.source, channels=embedder.channels, size=embedder.size, overrides=kept), []


def _notes(embedder: Embedder, bands: Sequence[int]) -> list[str]:
    """Return what the page states about thumbnails and privacy."""
    channels = (
        f"channel {bands[0] + 1}" if len(bands) == 1 else f"channels {', '.join(str(band + 1) for band in bands)}"
    )
    of = "all channels" if len(bands) == embedder.channels else f"{channels} of {embedder.channels}"
    window = embedder.pixels.get("window")
    limits = "" if window is None else f", in the window from {window[0]:g} to {window[1]:g}"
    return [
        f"Thumbnails: the centered square of each image, {of}{limits}, as the encoder reads it.",
        "The page holds the thumbnails and the names of the images; share it as you would share these.",
    ]


def explore_options(overrides: Sequence[str]) -> Options:
    """Read and validate the options; raises `InputError`."""
    given, settings = read_options("fedssl-explore", overrides, keys=_DEFAULTS)
    for key in ("encoder", "embeddings"):
        if key in given and "images" not in given:
            raise InputError(f"{key}= needs the images; add images=PATH")
    unused = [word for word in overrides if word.startswith(DATA_SET) and word.partition("=")[0] != _PATH_KEY]
    if unused and "images" not in given:
        raise InputError(f"{unused[0]} has no effect on the images of the run's clients; add images=PATH, or remove it")
    texts = _DEFAULTS | given
    check_method(texts["projection"])
    out, clusters = path_of(texts["out"]), texts["clusters"]
    check_output("out", out, ".html", ".htm")
    return Options(
        texts=texts,
        source=source_of(given),
        out=out,
        clusters=None
        if clusters == "auto"
        else int(number_of("clusters", clusters, 1, MAX_CLUSTERS, further=", or auto")),
        threshold=number_of("threshold", texts["threshold"], 0, 1, whole=False),
        limit=int(number_of("limit", texts["limit"], 1, MAX_LIMIT)),
        columns=[name.strip() for name in texts["columns"].strip("[]").split(",") if name.strip()],
        settings=settings,
    )
