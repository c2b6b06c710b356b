"""Features in a file of ``fedssl-embed``, compared with the images and the encoder that they belong to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from fedssl.embedding.embedder import Embedder
from fedssl.embedding.formats import EMBEDDING
from fedssl.errors import InputError, reason_of
from fedssl.explore.images import PathImages
from fedssl.text_table import csv_path

_CHECKED = 8  # images whose features are computed if a file does not state its encoder
_ROUNDING = 1e-2  # of features on other devices, relative to the largest


def read_features(file: Path, images: PathImages, embedder: Embedder) -> dict[str, np.ndarray]:
    """Return features by the names of the images; `InputError` if they are of other images or another encoder."""
    if not file.is_file() or file.suffix.lower() not in (".parquet", ".npy"):
        raise InputError(f"embeddings={file} must be a .parquet or .npy file; make it with fedssl-embed")
    try:
        names, features, about = (_read_parquet if file.suffix.lower() == ".parquet" else _read_npy)(file)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, pa.ArrowException) as error:
        raise InputError(
            f"embeddings={file} is damaged, or no file of fedssl-embed ({reason_of(error)}); make it again"
        ) from error
    again = f"make it again with: fedssl-embed run=DIR images=PATH out={file.name}"
    if features.ndim != 2 or features.shape[1] != embedder.dimension or len(names) != len(features):
        raise InputError(
            f"embeddings={file} has {len(names):,} names and features of shape {features.shape}, but this encoder has "
            f"{embedder.dimension} dimensions; {again}"
        )
    if about.get("encoder", embedder.digest) != embedder.digest:
        raise InputError(
            f"embeddings={file} is of another encoder, or of another backend than {type(embedder).__name__}; set run= "
            f"and backend= as for fedssl-embed, or {again}"
        )
    if about.get("images", digest := images.images.digest()) != digest:
        raise InputError(
            f"embeddings={file} is of other images, or these have changed since; set images= and dataset.* as for "
            f"fedssl-embed, or {again}"
        )
    if not np.isfinite(features).all():
        raise InputError(f"embeddings={file} has values that are NaN or infinite; {again}")
    listed = images.names(np.arange(len(images)))
    if file.suffix.lower() == ".npy":
        of_cell = {csv_path(name): name for name in listed}
        names = [of_cell.get(name, name) for name in names]
    known = dict(zip(names, features, strict=True))
    absent = np.array([row for row, name in enumerate(listed) if name not in known], dtype=np.int64)
    missing = [listed[row] for row in absent]
    # A file has no features of unreadable images.
    if missing and (len(missing) == len(images) or _any_readable(images, absent)):
        raise InputError(
            f"embeddings={file} has no features of {len(missing):,} of {len(images):,} images, such as {missing[0]}; "
            f"{again}"
        )
    if not about and not _agree(known, images, embedder, listed):
        raise InputError(
            f"embeddings={file} has other features than this encoder gives some of the images; set run=, images= and "
            f"dataset.* as for fedssl-embed, or {again}"
        )
    return known


def _any_readable(images: PathImages, rows: np.ndarray) -> bool:
    return any(len(block.rows) for block in images.images.at(rows).blocks(_CHECKED))


def _agree(known: Mapping[str, np.ndarray], images: PathImages, embedder: Embedder, names: Sequence[str]) -> bool:
    """Return whether the features of some images are those that the encoder computes, as another backend rounds."""
    rows = np.linspace(0, len(names) - 1, min(_CHECKED, len(names))).astype(int)
    (block,) = images.images.at(rows).blocks(len(rows))
    computed = embedder(block.images)
    found = [known[names[rows[row]]] for row in block.rows]
    tolerance = _ROUNDING * np.abs(computed).max(initial=0)
    return all(np.abs(one - other).max() <= tolerance for one, other in zip(found, computed, strict=True))


def _read_parquet(file: Path) -> tuple[list[str], np.ndarray, dict[str, str]]:
    table = pq.read_table(file, columns=["name", EMBEDDING])
    values = table[EMBEDDING].combine_chunks()
    features = values.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    about = json.loads((table.schema.metadata or {}).get(b"fedssl", b"{}"))
    return table["name"].to_pylist(), features.reshape(len(table), -1), dict(about)


def _read_npy(file: Path) -> tuple[list[str], np.ndarray, dict[str, str]]:
    features = np.load(file, mmap_mode="r", allow_pickle=False)
    types = pyarrow.csv.ConvertOptions(column_types={"name": pa.string()}, include_columns=["name"])
    names = pyarrow.csv.read_csv(file.with_suffix(".csv"), convert_options=types)["name"].to_pylist()
    return names, features, {}
