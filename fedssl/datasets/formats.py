"""Image files: the endings of their names, the formats of Pillow that may decode them, and modules for other formats.

None of these formats runs a program or fetches a file. Some need a package, which an extra installs.
"""

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from fedssl.errors import InputError
from fedssl.safe_io import FilePath, open_regular_file

_FORMATS = {
    "JPEG": (".jfif", ".jpe", ".jpeg", ".jpg"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".pbm", ".pgm", ".pnm", ".ppm"),
    "AVIF": (".avif",),
    "JPEG2000": (".j2k", ".jp2"),
}
# Formats of other packages than Pillow, which `fedssl[heif]`, `fedssl[dicom]`, ... install.
_OF_PILLOW = {"HEIF": (".heic", ".heif", ".hif"), "DICOM": (".dcm", ".dic", ".dicom", ".ima")}
_OF_MODULES = {
    "NIFTI": (".nii", ".nii.gz"),
    "ZARR": (".zarr",),
    "VIDEO": (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"),
}
_FURTHER = _OF_PILLOW | _OF_MODULES
PACKAGES = {
    "HEIF": "pillow-heif",
    "DICOM": "pydicom",
    "TIFF": "tifffile",
    "NIFTI": "nibabel",
    "VIDEO": "av",
    "ZARR": "imagecodecs",
}
DICOM_DECODERS = ("pylibjpeg", "pylibjpeg-libjpeg", "pylibjpeg-openjpeg")  # of compressed frames
OF_PILLOW_ALONE = {"JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM"}  # formats that need no further package
INSTALLED = frozenset(name for name, package in PACKAGES.items() if find_spec(package.replace("-", "_")) is not None)
_FORMATS |= {name: suffixes for name, suffixes in _OF_PILLOW.items() if name in INSTALLED}

FORMATS = tuple(_FORMATS)  # of Pillow: accepted by their content, regardless of the file's name
_ARRAYS = {"NPY": (".npy",)} | {name: suffixes for name, suffixes in _OF_MODULES.items() if name in INSTALLED}
FORMAT_OF = {suffix: name for name, suffixes in (_FORMATS | _ARRAYS).items() for suffix in suffixes}  # in lower case
SUFFIXES = tuple(sorted(FORMAT_OF))
DOUBLE_SUFFIXES = (".nii.gz", ".tar.gz")
VOLUMES = frozenset({"NPY", "NIFTI", "VIDEO", "ZARR"})  # formats of stacks of images
SEVERAL = VOLUMES | {"TIFF", "DICOM", "GIF", "WEBP", "AVIF", "PNG"}  # formats with pages, frames or slices
# Endings of files whose pages can only be found from the first on.
FROM_START = (".mpeg", ".mpg", ".nii.gz")
_ZARR = re.compile(r"\.zarr(/|$)", re.IGNORECASE)
HEAD_BYTES = 512  # by which `module_of` recognizes a format
GZIP = b"\x1f\x8b"  # of NIfTI
_NIFTI = ((344, b"n+1"), (344, b"ni1"), (4, b"n+2"), (4, b"ni2"))  # places and magic numbers
# Containers of FFmpeg by their magic numbers. That of MP4 is also that of AVIF and HEIC, by its brand.
_CONTAINERS = {b"\x1aE\xdf\xa3": "matroska", b"\0\0\1\xba": "mpeg", b"\0\0\1\xb3": "mpegvideo"}
_MP4 = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_IMAGE_BRANDS = (b"avi", b"he", b"hevx", b"mif", b"msf")
_COMMON = (b"\xff\xd8\xff", b"\x89PNG\r\n")  # JPEG and PNG
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

DICOM_SUFFIX, DICOM_DIRECTORY = ".dcm", "DICOMDIR"  # the latter lists the files of a disc and has no pixels
DICOM_PREAMBLE, DICOM_MAGIC = 128, b"DICM"  # the magic number follows 128 bytes


def installed_packages() -> list[str]:
    """Return the packages that decode images, without their versions."""
    return sorted(INSTALLED | {name for name in DICOM_DECODERS if find_spec(name.replace("-", "_")) is not None})


def register_formats() -> None:
    """Let `PIL.Image.open` read the formats of the installed packages."""
    if "HEIF" in INSTALLED:
        import_module("pillow_heif").register_heif_opener(thumbnails=False)
    if "DICOM" in INSTALLED:  # the last that Pillow tries; pydicom is imported with the first file
        Image.register_open(
            "DICOM", lambda stream, name: import_module("fedssl.datasets.dicom").DicomImageFile(stream, name)
        )


def missing_packages(ignored: Mapping[str, int]) -> list[tuple[int, str]]:
    """Return the number of ignored files, by ending, that each format needs a package for, and what to install."""
    counts = {
        name: sum(ignored.get(suffix, 0) for suffix in _FURTHER[name]) for name in _FURTHER if name not in INSTALLED
    }
    return [(count, f"{name} images need {_package_of(name)}") for name, count in counts.items() if count]


def require_package(name: str) -> None:
    """Raise an `InputError` if the package of a format is missing."""
    if name not in INSTALLED:
        raise InputError(f"{name} images of this kind need {_package_of(name)}")


def _package_of(name: str) -> str:
    """Return the package of a format, and how to install it."""
    package, extra = PACKAGES[name], name.lower()
    if find_spec("torch") is None:  # the extra would install it, which backend=onnx does without
        return f"{package} (pip install {package})"
    return f"{package} (uv sync --extra {extra}, or pip install 'fedssl[{extra}]')"


def module_of(head: bytes) -> str | None:
    """Return the module of this package that opens a file with these first bytes; None for those of Pillow."""
    if head.startswith(_COMMON):  # at once, because most images are small
        return None
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.startswith(GZIP) or any(head.startswith(magic, place) for place, magic in _NIFTI):
        return "nifti"
    is_dicom = head[DICOM_PREAMBLE:].startswith(DICOM_MAGIC)  # whose preamble may be that of TIFF
    if video_container(head) is not None and not is_dicom:
        return "video"
    return "tiff" if head.startswith(_TIFF) and not is_dicom else None


def video_container(head: bytes) -> str | None:
    """Return FFmpeg's name of the container that begins with these bytes; None for other files."""
    if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
        return "avi"
    if head[4:8] in _MP4 and not (head[4:8] == b"ftyp" and head[8:12].startswith(_IMAGE_BRANDS)):
        return "mov"
    return _CONTAINERS.get(head[:4])


def is_zarr(path: FilePath) -> bool:
    """Return whether a path is that of a folder of Zarr, which is one file here, or of an array in it."""
    return _ZARR.search(str(path)) is not None and Path(path).is_dir()


def is_dicom(file: FilePath) -> bool:
    """Return whether a regular file can be read and has the magic number of DICOM."""
    try:
        with open_regular_file(file) as stream:
            return stream.read(DICOM_PREAMBLE + len(DICOM_MAGIC))[DICOM_PREAMBLE:] == DICOM_MAGIC
    except OSError:
        return False
