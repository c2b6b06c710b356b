"""The partitions of all suites: one parquet file, from which the CSV files for ``partition=file`` are written."""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

FILE = Path(__file__).with_name("partitions.parquet")
DIGESTS = Path(__file__).with_name("SHA256SUMS")

_HEADER = "client,label"


def read_csv(name: str, file: Path = FILE) -> str:
    """Return the CSV text of a partition: the client and the label of every image."""
    table = pq.read_table(file, filters=pc.field("partition") == name)
    rows = zip(table["client"].to_pylist(), table["label"].to_pylist(), strict=True)
    return "\n".join([_HEADER, *(f"{client},{label}" for client, label in rows), ""])


def write_parquet(texts: Mapping[str, str], file: Path = FILE) -> None:
    """Write the CSV texts of all partitions into one file, whose bytes depend only on them and pyarrow's version."""
    tables = []
    for name, text in sorted(texts.items()):
        header, *rows = text.splitlines()
        assert header == _HEADER
        clients, labels = zip(*(map(int, row.split(",")) for row in rows), strict=True)
        columns = {"partition": pa.array([name] * len(rows)), "client": pa.array(clients, pa.int8())}
        tables.append(pa.table({**columns, "label": pa.array(labels, pa.int8())}))
    pq.write_table(pa.concat_tables(tables), file, compression="zstd", compression_level=19)


def write_digests(texts: Mapping[str, str], file: Path = DIGESTS) -> None:
    """Record the SHA-256 of every CSV text and of the parquet file, in the format of ``sha256sum``."""
    contents = {f"{name}.csv": text.encode() for name, text in texts.items()} | {FILE.name: FILE.read_bytes()}
    lines = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(contents.items()))
    file.write_text("".join(lines))


def write_csv(names: Iterable[str], folder: Path, *, file: Path = FILE, digests: Path = DIGESTS) -> None:
    """Write partitions as CSV files into ``folder``; exit if a digest differs from the recorded one."""
    recorded = dict(reversed(line.split()) for line in digests.read_text().splitlines())
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        text = read_csv(name, file)
        if hashlib.sha256(text.encode()).hexdigest() != recorded.get(f"{name}.csv"):
            sys.exit(f"{name} in {file} differs from the partition recorded in {digests}; restore both files")
        (folder / f"{name}.csv").write_text(text)
