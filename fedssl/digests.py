"""The two digests: XXH3 detects damage at the speed of memory, SHA-256 identifies content, also against forgery."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xxhash


def new_checksum(content: bytes | memoryview = b"") -> "xxhash.xxh3_64":
    """Return a checksum (XXH3, 64 bits) that can be continued by ``update``."""
    import xxhash  # here: a device may lack it before its requirements are checked

    return xxhash.xxh3_64(content)


def checksum(content: bytes | memoryview) -> str:
    """Return the checksum of some content in hexadecimal."""
    return new_checksum(content).hexdigest()


def new_identity(content: bytes | memoryview = b"") -> "hashlib._Hash":
    """Return a SHA-256 that can be continued by ``update``."""
    return hashlib.sha256(content)


def identity(content: bytes | memoryview) -> str:
    """Return the SHA-256 of some content in hexadecimal."""
    return new_identity(content).hexdigest()


def file_identity(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
