"""A fingerprint of the source code, by which server and clients can tell that they run the same."""

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client_app", "fedssl", "server_app", "strategies")  # those that travel in the bundle


@functools.cache
def code_fingerprint() -> str:
    """Hash of all source files of `PACKAGES`, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
