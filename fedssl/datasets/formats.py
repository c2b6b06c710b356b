"""Image files: the endings of their names, and the formats of Pillow that may decode them.

None of these formats runs a program or fetches a file. HEIC needs the package pillow-heif, DICOM needs pydicom.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

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
_FURTHER = {"HEIF": (".heic", ".heif", ".hif"), "DICOM": (".dcm", ".dic", ".dicom", ".ima")}  # of other packages
PACKAGES = {"HEIF": "pillow-heif", "DICOM": "pydicom"}  # which `fedssl[heif]` and `fedssl[dicom]` install
INSTALLED = frozenset(name for name, package in PACKAGES.items() if find_spec(package.replace("-", "_")) is not None)
_FORMATS |= {name: _FURTHER[name] for name in PACKAGES if name in INSTALLED}

FORMATS = tuple(_FORMATS)  # accepted by their content, regardless of the file's name
FORMAT_OF = {suffix: name for name, suffixes in _FORMATS.items() for suffix in suffixes}  # in lower case
SUFFIXES = tuple(sorted(FORMAT_OF))

DICOM_SUFFIX, DICOM_DIRECTORY = ".dcm", "DICOMDIR"  # the latter lists the files of a disc and has no pixels
DICOM_PREAMBLE, DICOM_MAGIC = 128, b"DICM"  # the magic number follows 128 bytes


def register_formats() -> None:
    """Let `PIL.Image.open` read the formats of the installed packages."""
    if "HEIF" in INSTALLED:
        import_module("pillow_heif").register_heif_opener(thumbnails=False)
    if "DICOM" in INSTALLED:
        import_module("fedssl.datasets.dicom").register()


def missing_packages(ignored: Mapping[str, int]) -> list[tuple[int, str]]:
    """Return the number of ignored files, by ending, that each format needs a package for, and what to install."""
    counts = {
        name: sum(ignored.get(suffix, 0) for suffix in _FURTHER[name]) for name in PACKAGES if name not in INSTALLED
    }
    return [
        (count, f"{name} images need {PACKAGES[name]} (pip install 'fedssl[{name.lower()}]')")
        for name, count in counts.items()
        if count
    ]


def is_dicom(file: FilePath) -> bool:
    """Return whether a regular file can be read and has the magic number of DICOM."""
    try:
        with open_regular_file(file) as stream:
            return stream.read(DICOM_PREAMBLE + len(DICOM_MAGIC))[DICOM_PREAMBLE:] == DICOM_MAGIC
    except OSError:
        return False
