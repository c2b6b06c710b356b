"""Gather the wheels that `gpu.py` needs on a machine without network.

The machine has Python 3.12 on x86-64 Linux with glibc 2.28 or newer, torch, torchvision, NumPy, SciPy, scikit-learn,
pandas, pyarrow, Pillow, Matplotlib, safetensors, networkx, threadpoolctl and Jinja2. The versions are those of this
environment. Flower's other dependencies are imported by its own services only.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

MAX_BYTES = 30_000_000  # of the wheels
PYTHON, NEWEST_GLIBC = "3.12", 28
WHEELS = ["flwr", "grpcio", "grpcio-health-checking", "protobuf", "cryptography", "cffi", "pycparser", "pycryptodome"]
WHEELS += ["iterators", "httpx", "typer", "click", "rich", "hydra-core", "omegaconf", "PyYAML", "xxhash", "packaging"]
WHEELS += ["filelock"]
BUILT = ["antlr4-python3-runtime"]  # has no wheel; pure Python


def prepare(folder: Path, data: Sequence[str]) -> None:
    """Gather the wheels and copies of the data files in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()  # pip refuses two versions of a package
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)]
    platforms.append("--platform=manylinux2014_x86_64")
    target = [f"--python-version={PYTHON}", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none"]
    pip("download", "--only-binary=:all:", *target, *platforms, "--dest", str(folder), *pinned(WHEELS))
    pip("wheel", "--wheel-dir", str(folder), *pinned(BUILT))
    wheels = list(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    if size > MAX_BYTES:
        sys.exit(
            f"the wheels have {size / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:.0f}; shorten the list in {__file__}"
        )
    for file in data:
        shutil.copy(file, folder)
    total = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {len(wheels)} wheels of {size / 1e6:.1f} MB, {total / 1e6:.1f} MB in all")


def pinned(names: Sequence[str]) -> list[str]:
    return [f"{name}=={version(name)}" for name in names]


def pip(command: str, *arguments: str) -> None:
    subprocess.run(["uvx", "pip", command, "--quiet", "--no-deps", *arguments], check=True)
