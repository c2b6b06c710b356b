"""Fingerprint of the source code, by which server and clients recognize each other's version; imports no torch."""

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("client_app", "fedssl", "server_app", "strategies")  # included in Flower's app bundle


@functools.cache
def code_fingerprint() -> str:
    """Return a hash of all source files of `PACKAGES`, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
