"""DICOM files as a format of Pillow, read by pydicom: their frames, in gray or RGB.

Gray values are those after the modality transformation (rescale slope and intercept, such as Hounsfield units), in mode
F, or in mode L if they have 8 bits and no transformation. ``info`` has:

- ``window``: the lowest and the highest value of the file's first window (VOI), if it has one, see PS3.3 C.11.2.1.2;
- ``range``: otherwise, the lowest and the highest value that its bits can hold;
- ``white_is_zero``: whether the file has MONOCHROME1, for mode F. In mode L white is 255;
- ``raster``: color of more than 8 bits, which the image has reduced to 8. Palettes have 8 bits.

Nothing else of the file is read, such as names of patients. Pixels need no more memory than rows times columns: a frame
that declares another size than its file, or that expands beyond it, is rejected before it is decoded. So are files that
are deflated as a whole, or whose header has an absurd number of elements or length of a value.
"""

import logging
import warnings
from collections.abc import Iterator
from copy import copy
from functools import partial
from io import BytesIO
from typing import IO, Any

import numpy as np
import pydicom
from PIL import Image, ImageFile
from pydicom.dataelem import RawDataElement
from pydicom.encaps import encapsulate, generate_fragmented_frames
from pydicom.filereader import read_sequence_item
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi
from pydicom.pixels.utils import pixel_array

from fedssl.datasets.dicom_checks import MAX_TABLE, check_run_lengths, check_segments, codestream_sizes
from fedssl.datasets.formats import DICOM_MAGIC, DICOM_PREAMBLE
from fedssl.datasets.pages import Successive, check_count
from fedssl.datasets.pixels import BIT_RANGE, FILE_WINDOW, RASTER, WHITE_IS_ZERO
from fedssl.datasets.raster import Raster

FORMAT = "DICOM"
_RLE = "1.2.840.10008.1.2.5"
_FLOAT_PIXELS = ("FloatPixelData", "DoubleFloatPixelData")
_MAX_READS = 2**17  # of a header: two or three for each element or item, also in sequences
_BYTES_PER_READ = 2**10  # of a file with many frames
_MAX_VALUE = 2**18  # bytes, other than pixels; tables have up to 2**17
_MAX_LIMIT, _MIN_RANGE = 1e30, 1e-30  # of the values of black and white, for 32-bit floats
_CHARACTER_SET = (b"\x08\0\x05\0", b"\0\x08\0\x05")  # its tag, which pydicom always reads
_TAGS = ["Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames"]
_TAGS += ["BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData", *_FLOAT_PIXELS]
_GROUPS = ["SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"]
_GROUP_TAGS = ["RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth", "VOILUTFunction"]  # may be in groups
_TABLES = ["ModalityLUTSequence", "VOILUTSequence"]
_TAGS += [*_GROUPS, *_GROUP_TAGS, *_TABLES]
for _color in ("Red", "Green", "Blue"):
    _TAGS += [f"{_color}PaletteColorLookupTable{part}" for part in ("Descriptor", "Data")]
    _TAGS += [f"Segmented{_color}PaletteColorLookupTableData"]

# It reports each deviation from the standard, and a frame that cannot be decoded with a traceback. A filter for all
# threads, since `warnings.catch_warnings` is for one.
logging.getLogger("pydicom").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", module="pydicom")


class DicomImageFile(ImageFile.ImageFile):
    """A DICOM file. `PIL.Image.open` returns it after `register`."""

    format, format_description = FORMAT, "Digital Imaging and Communications in Medicine"

    def _open(self) -> None:
        assert self.fp is not None
        if self.fp.read(DICOM_PREAMBLE + len(DICOM_MAGIC))[DICOM_PREAMBLE:] != DICOM_MAGIC:
            raise SyntaxError("it is not DICOM")  # as Pillow expects of a format
        self.fp.seek(0)
        self._dataset: Any = pydicom.dcmread(_Limited(self.fp), specific_tags=_TAGS)
        dataset = self._dataset
        if not any(name in dataset for name in (*_FLOAT_PIXELS, "PixelData")) or "Rows" not in dataset:
            raise ValueError("it has no pixels")
        self._groups = _Groups(dataset)
        _keep_first_items(dataset)
        _check_header(dataset)
        self._size = int(dataset.Columns), int(dataset.Rows)
        self.n_frames = int(dataset.get("NumberOfFrames") or 1)
        check_count(self.n_frames)
        if dataset.file_meta.TransferSyntaxUID.is_encapsulated:
            self._frames = Successive(partial(_encoded_frames, dataset.get("PixelData"), self.n_frames))
        self._show(0)

    def _show(self, frame: int) -> None:
        """Set the mode and the values of black and white of a frame."""
        self._frame, self._is_loaded, dataset = frame, False, self._dataset
        self._groups.copy(frame, dataset)
        self.info = {WHITE_IS_ZERO: dataset.PhotometricInterpretation == "MONOCHROME1"}
        if dataset.SamplesPerPixel != 1 or dataset.PhotometricInterpretation == "PALETTE COLOR":
            self._mode = "RGB"
            if dataset.PhotometricInterpretation != "PALETTE COLOR" and (bits := int(dataset.BitsStored)) > 8:
                shape, limits = (self.height, self.width, 3), (0, 2**bits - 1)
                self.info[RASTER] = Raster(shape=shape, load=self._decoded, limits=limits)
            return
        low, high, name = _limits(dataset)
        self._mode = "F" if (low, high) != (0, 255) or _transforms(dataset) else "L"
        if not (-_MAX_LIMIT < low < high < _MAX_LIMIT and high - low > _MIN_RANGE):
            raise ValueError(f"its values of black and white would be {low:g} and {high:g}")
        if self._mode == "F":
            self.info[name] = low, high

    def seek(self, frame: int) -> None:
        """Go to a frame; an `EOFError` if there is none with this number."""
        if self._seek_check(frame):
            self._show(frame)

    def tell(self) -> int:
        """Return the number of the frame."""
        return self._frame

    def load(self) -> Any:
        """Decode the frame."""
        if not self._is_loaded:
            values = self._decoded()
            if self.mode == "RGB":
                values = _eight_bits(values, self._dataset)
            elif self.mode == "L" and self.info[WHITE_IS_ZERO]:
                values = 255 - values
            dtype = np.float32 if self.mode == "F" else np.uint8
            self.im = Image.fromarray(np.ascontiguousarray(values.astype(dtype, copy=False))).im
            self._is_loaded = True
        return Image.Image.load(self)

    def _decoded(self) -> np.ndarray:
        dataset, number = self._dataset, self._frame
        if dataset.file_meta.TransferSyntaxUID.is_encapsulated:
            dataset, number = _only_frame(dataset, self._frames[number]), 0
        try:
            values = _values(dataset, number)
        except RuntimeError as error:  # with a list of packages
            syntax = dataset.file_meta.TransferSyntaxUID.name
            raise ValueError(
                f"{syntax} needs a decoder: pip install pylibjpeg pylibjpeg-libjpeg; or its frame is damaged"
            ) from error
        if values.shape[:2] != self.size[::-1]:
            raise ValueError(f"its frame has {values.shape[1]} x {values.shape[0]} pixels")
        return values


def register() -> None:
    """Let `PIL.Image.open` read DICOM."""
    Image.register_open(FORMAT, DicomImageFile)


class _Limited:
    """A stream whose header may need `_MAX_READS`, and more for many frames, and that is not read as a whole."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.seek, self.tell, self._read = stream.seek, stream.tell, stream.read
        start = stream.tell()
        self._left, self._in_character_set = _MAX_READS + (stream.seek(0, 2) - start) // _BYTES_PER_READ, False
        stream.seek(start)

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            raise ValueError("its transfer syntax is deflated; convert it, e.g. with dcmconv +te")
        self._left -= size if self._in_character_set else 1  # each of its bytes may be a name to look up
        if self._left < 0:
            raise ValueError("its header or its frame has too many parts")
        content = self._read(size)
        starts = size == 8 and content[:4] in _CHARACTER_SET  # with its kind and its length
        self._in_character_set = starts or (self._in_character_set and size == 4)
        return content


class _Groups:
    """Windows and rescale values of an enhanced image: those of the file, of all frames, and of each frame."""

    def __init__(self, dataset: Any) -> None:
        shared, each = (dataset.get_item(name) if name in dataset else None for name in _GROUPS)
        self._common = {tag: dataset.get_item(tag) for tag in _GROUP_TAGS if tag in dataset}
        self._common |= _group_values(next(_items(shared), None))
        self._each = Successive(partial(_items, each))
        for name in _GROUPS:
            dataset.pop(name, None)

    def copy(self, frame: int, dataset: Any) -> None:
        """Let a data set have the values of a frame."""
        values = self._common | _group_values(self._each[frame])
        for tag in _GROUP_TAGS:
            dataset.pop(tag, None)
            if tag in values:
                dataset[tag] = values[tag]
        _check_lengths(dataset)


def _group_values(item: Any) -> dict[str, Any]:
    """Return the window and the rescale values in an item of a sequence of groups."""
    values: dict[str, Any] = {}
    for name in ("FrameVOILUTSequence", "PixelValueTransformationSequence"):
        group = None if item is None or name not in item else next(_items(item.get_item(name)), None)
        values |= {} if group is None else {tag: group.get_item(tag) for tag in _GROUP_TAGS if tag in group}
    return values


def _keep_first_items(dataset: Any) -> None:
    """Reduce sequences of tables to their first item."""
    for name in _TABLES:
        first = next(_items(dataset.get_item(name)), None) if name in dataset else None
        dataset.pop(name, None)
        if first:
            _check_lengths(first)
            setattr(dataset, name, [first])


def _items(element: Any) -> Iterator[Any]:
    """Yield the items of a sequence, without reading those after them; nothing for None."""
    if element is None or not element.value:
        return
    if not isinstance(element, RawDataElement):
        yield from element.value
        return
    stream = BytesIO(element.value)
    while stream.tell() < len(element.value):
        limited: Any = _Limited(stream)
        item = read_sequence_item(limited, element.is_implicit_VR, element.is_little_endian, "iso8859")
        if item is None:
            return
        yield item


def _check_lengths(dataset: Any) -> None:
    """Raise a `ValueError` for a value of absurd length, before it is split into numbers."""
    pixels = {pydicom.tag.Tag(name) for name in (*_FLOAT_PIXELS, "PixelData")}
    for element in dataset.elements():
        size = len(element.value or b"") if isinstance(element, RawDataElement) else 0
        if size > _MAX_VALUE and element.tag not in pixels:
            raise ValueError(f"the value of its tag {element.tag} has {size:,} bytes")


def _check_header(dataset: Any) -> None:
    """Raise a `ValueError` for values that would need too much memory, or give other pixels than those of the file."""
    _check_lengths(dataset)
    if "PixelData" in dataset and int(dataset.get("HighBit") or 0) >= int(dataset.BitsStored):
        raise ValueError(f"its HighBit is {dataset.HighBit}, above BitsStored={dataset.BitsStored}; convert it")
    for name in ("Red", "Green", "Blue"):
        table = dataset.get(f"Segmented{name}PaletteColorLookupTableData")
        if table:
            check_segments(table, wide=dataset.RedPaletteColorLookupTableDescriptor[2] > 8)


def _transforms(dataset: Any) -> bool:
    """Return whether the stored values differ from those of the modality, or from those to show."""
    return any(dataset.get(name) for name in (*_TABLES, "WindowWidth")) or _rescale(dataset) != (1, 0)


def _rescale(dataset: Any) -> tuple[float, float]:
    """Return the slope and the intercept, either of which may be missing or empty."""
    slope, intercept = (_first(dataset.get(name)) for name in ("RescaleSlope", "RescaleIntercept"))
    return 1.0 if slope is None else slope, intercept or 0.0


def _window(dataset: Any) -> tuple[float, float] | None:
    """Return the lowest and the highest value of the first window; None if there is none."""
    center, width = (_first(dataset.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if center is None or width is None or width <= 0:
        return None
    if dataset.get("VOILUTFunction") in ("LINEAR_EXACT", "SIGMOID") or width < 1:  # below 1: of small fractions
        return center - width / 2, center + width / 2
    return center - 0.5 - (width - 1) / 2, center - 0.5 + max(width - 1, 1) / 2


def _limits(dataset: Any) -> tuple[float, float, str]:
    """Return the values of black and white, and their key in ``info``."""
    window = _window(dataset)
    if window is not None:
        return *window, FILE_WINDOW
    if dataset.get("VOILUTSequence"):
        return 0.0, 2.0 ** dataset.VOILUTSequence[0].LUTDescriptor[2] - 1, FILE_WINDOW
    if dataset.get("ModalityLUTSequence"):
        return 0.0, 2.0 ** dataset.ModalityLUTSequence[0].LUTDescriptor[2] - 1, BIT_RANGE
    if "PixelData" not in dataset:
        return 0.0, 1.0, BIT_RANGE
    bits, signed = int(dataset.BitsStored), bool(dataset.PixelRepresentation)
    stored = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)
    slope, intercept = _rescale(dataset)
    low, high = sorted(slope * value + intercept for value in stored)
    return low, high, BIT_RANGE


def _first(value: Any) -> float | None:
    """Return the first value of a tag that may have several."""
    if value is None or isinstance(value, str | bytes):
        return float(value) if value else None  # not a number: the file is unreadable
    first = next(iter(value), None) if hasattr(value, "__iter__") else value
    return None if first in (None, "") else float(first)


def _encoded_frames(content: bytes | None, count: int) -> Iterator[bytes]:
    """Yield the encoded frames of a file."""
    if content is None:
        raise ValueError("it has encoded floats")
    if int.from_bytes(content[4:8], "little") > _MAX_VALUE:
        raise ValueError("its offset table is too long")
    stream: Any = _Limited(BytesIO(content))
    for parts in generate_fragmented_frames(stream, number_of_frames=count):
        yield b"".join(parts)


def _only_frame(dataset: Any, frame: bytes | None) -> Any:
    """Return a data set with one encoded frame; a `ValueError` if it may need more memory than the declared size."""
    if frame is None:
        raise ValueError("its frame is missing")
    rows, columns = int(dataset.Rows), int(dataset.Columns)
    if dataset.file_meta.TransferSyntaxUID == _RLE:
        check_run_lengths(frame, rows * columns, int(dataset.SamplesPerPixel))
    elif (sizes := codestream_sizes(frame)) != {(rows, columns)}:
        found = ", ".join(map(str, sorted(sizes))) or "none"
        raise ValueError(f"its frame has another size {found} than its header {(rows, columns)}")
    alone = copy(dataset)
    alone.PixelData, alone.NumberOfFrames = encapsulate([frame]), 1
    return alone


def _values(dataset: Any, number: int) -> np.ndarray:
    """Return a frame, ``(rows, columns)`` after the modality transformation, or RGB ``(rows, columns, 3)``."""
    values = pixel_array(dataset, index=number)  # YBR becomes RGB
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        return apply_color_lut(_clipped(values, dataset.RedPaletteColorLookupTableDescriptor), dataset)
    if values.ndim == 3:
        return values
    if dataset.get("ModalityLUTSequence"):
        values = apply_modality_lut(values, dataset)
    elif (rescale := _rescale(dataset)) != (1, 0):
        values = values * np.float64(rescale[0]) + rescale[1]
    if dataset.get("VOILUTSequence") and _window(dataset) is None:
        values = apply_voi(_clipped(values, dataset.VOILUTSequence[0].LUTDescriptor), dataset)
    return values


def _clipped(values: np.ndarray, descriptor: Any) -> np.ndarray:
    """Replace values beyond a table by its last, since pydicom's index of a table with 8 bits has 8 bits, too."""
    entries, first = descriptor[0] or MAX_TABLE, descriptor[1]
    clipped: np.ndarray = np.minimum(values.astype(np.int32), first + entries - 1)
    return clipped


def _eight_bits(values: np.ndarray, dataset: Any) -> np.ndarray:
    """Return the upper 8 bits of the values of a color image."""
    bits = int(dataset.BitsStored)
    if dataset.PhotometricInterpretation == "PALETTE COLOR":  # a table may have fewer bits than it states
        bits = min(int(dataset.RedPaletteColorLookupTableDescriptor[2]), 8 * values.itemsize)
    return values if bits == 8 else values.astype(np.float32) * np.float32(255.999 / (2**bits - 1))
