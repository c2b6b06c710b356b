"""Fingerprint of the source code, by which server and clients recognize each other's version; imports no torch."""

import functools
from pathlib import Path

from fedssl.digests import new_identity

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("client_app", "fedssl", "server_app", "strategies")  # included in Flower's app bundle


@functools.cache
def code_fingerprint() -> str:
    """Return a hash of all source files of `PACKAGES`, 16 hexadecimal digits."""
    digest = new_identity()
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
