"""A fingerprint of the source code that runs, so that server and clients can tell that they run the same."""

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client_app", "fedssl", "server_app", "strategies")


@functools.cache
def code_fingerprint() -> str:
    """Hash of all source files of the packages that travel in the bundle, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
