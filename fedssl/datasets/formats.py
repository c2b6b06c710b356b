"""Image files: the endings of their names, and the formats of Pillow that may decode them.

None of these formats runs a program or fetches a file. HEIC needs the package pillow-heif.
"""

from importlib.util import find_spec

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
HEIF_SUFFIXES = (".heic", ".heif", ".hif")
HEIF_INSTALLED = find_spec("pillow_heif") is not None
if HEIF_INSTALLED:
    _FORMATS["HEIF"] = HEIF_SUFFIXES

FORMATS = tuple(_FORMATS)  # accepted by their content, regardless of the file's name
SUFFIXES = tuple(sorted(suffix for suffixes in _FORMATS.values() for suffix in suffixes))  # in lower case
