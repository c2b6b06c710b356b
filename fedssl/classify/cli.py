"""The command ``fedssl-classify``: classify images by a few labeled ones, and choose which to label next.

    fedssl-classify run=DIR labeled=PATH images=PATH [out=predictions.csv]
    fedssl-classify run=DIR labeled=PATH [onnx=FILE.onnx] [report=FILE.json]
    fedssl-classify run=DIR [labeled=PATH] images=PATH label_next=NUMBER [next=label_next.csv]

``labeled`` is a folder with one subfolder per class, or a CSV or parquet file with the columns path and label
(``dataset.label=NAME`` for another name). Images with one value of its column group (or ``dataset.group=NAME``) are
never on both sides of the cross-validation. Labeled images, and copies of them, are left out of the predictions unless
``include_labeled=true``, and always of those to label next. Without ``images``, those to label next are the images of
``labeled`` that have no label.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import digits

import numpy as np

from fedssl.atomic_files import write_text
from fedssl.classify.classifier import Classifier
from fedssl.classify.label_next import DUPLICATE, FEW, MAX_POOL, next_to_label
from fedssl.classify.labeled import UNLABELED, LabeledImages, list_labeled, read_labeled, without_labels
from fedssl.classify.onnx_file import NUM_CHECKED, check_packages, write_onnx
from fedssl.classify.options import OUTPUTS, Options, check_outputs, classify_options
from fedssl.classify.results import describe, prediction_rows, report
from fedssl.classify.validation import train
from fedssl.config.commands import run_with_overrides
from fedssl.datasets.formats import is_zarr
from fedssl.embedding import Embedder, Embeddings, load_embedder
from fedssl.embedding.embeddings import embed_list, list_for, unit_features
from fedssl.errors import InputError
from fedssl.text_table import csv_cell, to_csv

USAGE = (
    "usage: fedssl-classify run=DIR labeled=PATH [images=PATH] [out=predictions.csv] [onnx=FILE] [report=FILE.json]\n"
    "       [label_next=NUMBER] [next=label_next.csv] [include_labeled=true] [skip_unreadable=true]\n"
    "       [backend=torch|onnx] [device=NAME] [seed=NUMBER] [dataset.label=COLUMN] [dataset.group=COLUMN]\n"
    "       fedssl-classify run=DIR images=PATH label_next=NUMBER\n"
    "       --config-dir FOLDER: folder with the settings of your own encoder"
)


def main() -> int:
    """Run the command, and return its exit status, see `run_command`."""
    return run_with_overrides("fedssl-classify", USAGE, run)


def run(overrides: Sequence[str]) -> str:
    """Classify by the overrides, write the files, and return the text to print."""
    options = classify_options(overrides)
    if options.onnx is not None:
        check_packages()
    embedder = load_embedder(options.source, device=options.device, backend=options.backend, folders=options.folders)
    labeled, images = _read(options, embedder)
    model = None
    lines, texts = list[str](), dict[Path, str]()
    if labeled is not None:
        model, validation = train(
            labeled.known, labeled.labels, classes=labeled.classes, groups=labeled.groups, seed=options.seed
        )
        lines += describe(labeled, validation, temperature=model.temperature)
        if options.report is not None:
            texts[options.report] = json.dumps(report(labeled, model, validation), indent=2) + "\n"
        if options.out is not None and images is not None:
            rows = np.arange(len(images.names)) if options.include_labeled else without_labels(images, labeled)
            texts[options.out] = to_csv(prediction_rows(images, labeled, model, rows))
            hint = "" if len(rows) else " (all of them are labeled; include_labeled=true predicts these, too)"
            lines.append(f"predictions of {len(rows):,} of {len(images.names):,} images{hint}: {options.out}")
    pool = labeled.embeddings if images is None and labeled is not None else images
    if options.next is not None and pool is not None:
        chosen, hint = _label_next(pool, labeled, model, options, options.next)
        texts[options.next] = to_csv(_rows_to_label(pool, model, chosen, options.next))
        lines.append(f"{len(chosen):,} images to label next: {options.next}{hint}")
    if options.onnx is not None and labeled is not None and model is not None:
        difference = write_onnx(options, embedder, model, labeled.embeddings.decode(labeled.rows[:NUM_CHECKED]))
        lines.append(f"encoder and classifier, with a largest difference of {difference:.1e}: {options.onnx}")
    for file, text in texts.items():
        write_text(file, text)
    return "\n".join(lines)


def _read(options: Options, embedder: Embedder) -> tuple[LabeledImages | None, Embeddings | None]:
    """Return the labeled images and the others; everything that can be wrong without features is checked before."""
    labeled = images = None
    if options.labeled is not None:
        labeled = list_labeled(embedder, options.labeled, options.settings)
    if options.images is not None:
        settings = {key: value for key, value in options.settings.items() if key not in ("label", "group", "folders")}
        images = list_for(embedder, options.images, settings | UNLABELED)
    check_outputs(options)
    skip = options.skip_unreadable
    return (
        None if labeled is None else read_labeled(embedder, labeled, options.settings, skip_unreadable=skip),
        None if images is None else embed_list(embedder, images, skip_unreadable=skip),
    )


def _label_next(
    pool: Embeddings, labeled: LabeledImages | None, model: Classifier | None, options: Options, table: Path
) -> tuple[np.ndarray, str]:
    """Return the rows of the images to label next, the most useful first, and what to add to their line."""
    unlabeled = without_labels(pool, labeled)
    folder = f"{pool.images.root.absolute()}/"
    rows = unlabeled[[csv_cell(path) == path for path in (folder + pool.names[row] for row in unlabeled)]]
    unwritable = len(unlabeled) - len(rows)
    named = f"{unwritable:,} images whose names or folders have control characters or are not in UTF-8"
    if not len(rows):
        found = f" but {named}; rename these, or" if unwritable else ";"
        raise InputError(f"label_next finds no image without a label{found} give others with images=PATH")
    features, known, margins = pool.features[rows], pool.features[:0], None
    if labeled is not None and model is not None:
        known = labeled.known
        if len(known) >= FEW * len(labeled.classes):
            margins = -np.diff(np.sort(model.probabilities(features), axis=1)[:, :-3:-1])[:, 0]
    center = np.concatenate([features, known]).mean(axis=0, dtype=np.float64)
    unit, unit_known = (unit_features(each, center=center) for each in (features, known))
    chosen = rows[next_to_label(unit, unit_known, count=options.label_next, margins=margins, seed=options.seed)]
    hint = f"; without {named}" if unwritable else ""
    if len(chosen) < min(options.label_next, len(rows), MAX_POOL):
        considered = f" of the {MAX_POOL:,} images that are considered" if len(rows) > MAX_POOL else ""
        hint += f"; the others{considered} are near duplicates of these or of labeled ones (cosine from {DUPLICATE})"
    places = pool.images.places(np.sort(pool.rows[chosen]))
    files = [pool.images.root / place.file for place in places]
    if any(place.part for place in places) or any(file.is_dir() and not is_zarr(file) for file in files):
        hint += "; some are parts of files, or folders: write their labels beside the images, not into this table"
    elif len(chosen):
        hint += f"; once labeled, {_continuation(options, table)}"
    return chosen, hint


def _continuation(options: Options, table: Path) -> str:
    """Return how to use the labels of a table together with those of ``labeled``."""
    stem = table.stem.rstrip(digits) or table.stem  # 1.csv is no part of a series
    labeled, tables = options.labeled, table.with_name(f"{stem}*{table.suffix}")
    pattern = _in_braces(tables)
    if labeled is None or labeled.absolute().match(str(tables.absolute())):
        both = pattern
    elif ".csv" not in labeled.name:
        return f"add them to {labeled}"
    elif pattern in str(labeled):
        both = str(labeled)
    else:
        both = f"{{{_in_braces(labeled) if labeled.is_file() else labeled},{pattern}}}"
    outputs = " and ".join(f"another {key}=" for key in OUTPUTS if vars(options)[key] is not None)
    return f"continue with {shlex.quote(f'labeled={both}')} and {outputs}"


def _in_braces(path: Path) -> str:
    """Return a pattern of a path, with a wildcard for each character that has a meaning in braces."""
    folders = [re.sub(r"[][,{}*?]", "?", part) if {*part} & {*",{}"} else part for part in path.parent.parts]
    return str(Path(*folders, re.sub("[,{}]", "?", path.name)))


def _rows_to_label(
    images: Embeddings, model: Classifier | None, rows: np.ndarray, table: Path
) -> Iterator[list[object]]:
    """Yield the lines of a table that is read as ``labeled`` once its labels are written."""
    yield ["path", "label", *(["prediction", "probability"] if model is not None else [])]
    for row in rows:
        line: list[object] = [_path_in(table, images, row), ""]
        if model is not None:
            (probabilities,) = model.probabilities(images.features[[row]])
            line += [model.classes[probabilities.argmax()], f"{probabilities.max():.4f}"]
        yield line


def _path_in(table: Path, images: Embeddings, row: int) -> str:
    """Return the path of an image in a table: relative below the folder of the table, else absolute."""
    image, folder = (images.images.root / images.names[row]).absolute(), table.absolute().parent
    return f"./{image.relative_to(folder).as_posix()}" if image.is_relative_to(folder) else str(image)
