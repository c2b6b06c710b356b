"""Files of features: parquet, NPY, LanceDB and FAISS, written in pieces and renamed when they are complete."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from fedssl.atomic_files import atomic_write
from fedssl.config.commands import check_new, check_output
from fedssl.datasets.holdout import NO_LABEL
from fedssl.embedding.image_list import ImageList
from fedssl.embedding.partial import Partial, names_marker
from fedssl.errors import InputError
from fedssl.safe_io import valid_text
from fedssl.text_table import csv_cell, csv_path

_CHUNK = 4096  # images
EMBEDDING = "embedding"  # name of the column of features


@dataclass(frozen=True)
class Table:
    """Features of readable images with what is known about these, for a writer."""

    images: ImageList
    partial: Partial
    about: Mapping[str, Any]

    @property
    def schema(self) -> pa.Schema:
        """Types of the columns; those of which nothing is known are missing."""
        fields = [("name", pa.string()), ("file", pa.string()), ("part", pa.string())]
        if self.images.labels is not None:
            fields.append(("label", pa.string() if self.images.classes else pa.int64()))
        if self.images.groups(np.arange(0)) is not None:
            fields.append(("group", pa.string()))
        fields.append((EMBEDDING, pa.list_(pa.float32(), self.partial.dimension)))
        return pa.schema(fields, metadata={"fedssl": json.dumps(self.about)})

    def batches(self, *, embedding: bool = True) -> Iterator[pa.RecordBatch]:
        """Yield the rows in pieces, with or without the features."""
        schema = self.schema if embedding else self.schema.remove(len(self.schema) - 1)
        for rows, features in self.partial.chunks(_CHUNK):
            columns = self._columns(rows)
            if embedding:
                columns[EMBEDDING] = pa.FixedSizeListArray.from_arrays(features.reshape(-1), self.partial.dimension)
            yield pa.record_batch([pa.array(columns[name], schema.field(name).type) for name in schema.names], schema)

    def _columns(self, rows: np.ndarray) -> dict[str, Any]:
        places, labels, groups = self.images.places(rows), self.images.labels, self.images.groups(rows)
        classes = [valid_text(name) for name in self.images.classes]
        columns: dict[str, Any] = {
            "name": [valid_text(place.name) for place in places],
            "file": [valid_text(str(place.file)) for place in places],
            "part": [place.part or None for place in places],
            "group": None if groups is None else list(map(valid_text, groups)),
        }
        if labels is not None:
            numbers = labels[rows].tolist()
            columns["label"] = [
                None if number == NO_LABEL else classes[number] if classes else number for number in numbers
            ]
        return columns


def _write_parquet(table: Table, out: Path) -> None:
    schema = table.schema

    def write(stream: BinaryIO) -> None:
        texts = [name for name in schema.names if name != EMBEDDING]
        with pq.ParquetWriter(stream, schema, use_dictionary=texts) as writer:
            for batch in table.batches():
                writer.write_batch(batch)

    atomic_write(out, write)


def _write_npy(table: Table, out: Path) -> None:
    def write(stream: BinaryIO) -> None:
        header = {"descr": "<f4", "fortran_order": False, "shape": (table.partial.count, table.partial.dimension)}
        np.lib.format.write_array_header_2_0(stream, header)
        with table.partial.file.open("rb") as features:
            shutil.copyfileobj(features, stream, 2**22)

    _write_names(table, out)
    atomic_write(out, write)


def _write_names(table: Table, out: Path) -> None:
    """Write the rows without features as a CSV file beside ``out``, with paths as `csv_path` writes them."""
    schema = table.schema.remove(len(table.schema) - 1)
    texts = [name for name in schema.names if schema.field(name).type == pa.string()]
    escapes = {name: csv_path if name in ("name", "file") else csv_cell for name in texts}

    def write(stream: BinaryIO) -> None:
        with pa.csv.CSVWriter(stream, schema) as writer:
            for batch in table.batches(embedding=False):
                columns = batch.to_pydict()
                for name, escape in escapes.items():
                    columns[name] = [None if text is None else escape(text) for text in columns[name]]
                writer.write_batch(pa.RecordBatch.from_pydict(columns, schema))

    names_marker(out).touch()
    atomic_write(out.with_suffix(".csv"), write)


def _write_faiss(table: Table, out: Path) -> None:
    """Write an exact index of cosine similarity, which needs the memory of all features."""
    faiss = import_module("faiss")
    index = faiss.IndexFlatIP(table.partial.dimension)
    for _, features in table.partial.chunks(_CHUNK):
        faiss.normalize_L2(features)
        index.add(features)
    _write_names(table, out)
    with _beside(out) as folder:
        faiss.write_index(index, str(folder / out.name))
        (folder / out.name).replace(out)


def _write_lance(table: Table, out: Path) -> None:
    """Write a table, which is a folder, of the database in the folder of ``out``."""
    with _beside(out) as folder:
        reader = pa.RecordBatchReader.from_batches(table.schema, table.batches())
        import_module("lancedb").connect(str(folder)).create_table(out.stem, data=reader)
        (folder / f"{out.stem}.lance").rename(out)


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        yield Path(folder)


# By the ending of the file: the package that it needs, if any, and what writes it.
FORMATS: Mapping[str, tuple[str, Callable[[Table, Path], None]]] = {
    ".parquet": ("", _write_parquet),
    ".npy": ("", _write_npy),
    ".lance": ("lancedb", _write_lance),
    ".faiss": ("faiss", _write_faiss),
}


def check_out(out: Path, images: Path) -> None:
    """Raise an `InputError` if no file of features can be written to ``out``."""
    check_output("out", out, *FORMATS)
    package, _ = FORMATS[out.suffix.lower()]
    if package and find_spec(package) is None:
        raise InputError(
            f"out={out} needs {package}; install it: uv sync --extra {package}, or pip install 'fedssl[{package}]'; "
            "or choose a name in .parquet"
        )
    has_names = (
        out.suffix.lower() in (".npy", ".faiss") and not names_marker(out).exists()
    )  # else of an interrupted call
    names = [out.with_suffix(".csv")] if has_names else []
    for file in (out, *names):
        check_new("out", file)
    if images.is_dir() and images.resolve() in out.resolve().parents:
        raise InputError(f"out={out} is inside of images={images}, and would be read as images; choose another folder")
