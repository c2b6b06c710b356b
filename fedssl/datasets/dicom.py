"""DICOM files as a format of Pillow, read by pydicom: their frames, in gray or RGB.

Gray values are those after the modality transformation (rescale slope and intercept, such as Hounsfield units), in mode
F, or in mode L if they have 8 bits and no transformation. ``info`` has:

- ``window``: the lowest and the highest value of the file's first window (VOI), if it has one, see PS3.3 C.11.2.1.2;
- ``sigmoid``: whether that window is one of a sigmoid (C.11.2.1.3.1);
- ``range``: otherwise, the lowest and the highest value that its bits can hold;
- ``white_is_zero``: whether the file has MONOCHROME1, for mode F. In mode L white is 255;
- ``modality``: the kind of device, such as CT, for warnings;
- ``raster``: color of more than 8 bits, which the image has reduced to 8. Palettes have 8 bits.

Pixels beside the image (``PixelPaddingValue``) are NaN in mode F, and 0 in mode L.

Nothing else of the file is read, such as names of patients. Of its pixels only the requested frame is read, so that
files with many frames may have any size. Pixels need no more memory than rows times columns: a frame
that declares another size than its file, or that expands beyond it, is rejected before it is decoded. So are files that
are deflated as a whole, or whose header has an absurd number of elements or length of a value.
"""

import logging
import struct
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
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.utils import as_pixel_options, pixel_array
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

from fedssl.datasets.dicom_checks import check_run_lengths, check_segments, codestream_sizes
from fedssl.datasets.dicom_values import PADDING, TABLES, eight_bits, is_beside_image, limits_of, transforms, values_of
from fedssl.datasets.formats import DICOM_DECODERS, DICOM_MAGIC, DICOM_PREAMBLE
from fedssl.datasets.pages import Successive, check_count
from fedssl.datasets.pixels import FILE_WINDOW, MODALITY, RASTER, SIGMOID, WHITE_IS_ZERO
from fedssl.datasets.raster import Raster
from fedssl.safe_io import sanitize_line

_RLE = "1.2.840.10008.1.2.5"
_PIXELS = {0x7FE00008: "FloatPixelData", 0x7FE00009: "DoubleFloatPixelData", 0x7FE00010: "PixelData"}
_KINDS = (b"OB", b"OW", b"OF", b"OD", b"UN")  # value representations of pixels
_FLOATS = ("FloatPixelData", "DoubleFloatPixelData")
_BYTES_PER_VALUE = 8  # of an encoded frame, at most
_BARE = ((b"\x08\0", b"\2\0"), b"\0")  # groups and upper byte of the first tag of old files without a magic number
_MAX_READS = 2**17  # of a header: two or three for each element or item, also in sequences
_BYTES_PER_READ = 2**10  # of a file with many frames
_MAX_VALUE = 2**18  # bytes, other than pixels; tables have up to 2**17
_MAX_LIMIT, _MIN_RANGE = 1e30, 1e-30  # of the values of black and white, for 32-bit floats
_CHARACTER_SET = (b"\x08\0\x05\0", b"\0\x08\0\x05")  # its tag, which pydicom always reads
_TAGS = ["Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames"]
_TAGS += ["BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation"]
_GROUPS = ["SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"]
_GROUP_TAGS = ["RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth", "VOILUTFunction"]  # may be in groups
_TAGS += [*_GROUPS, *_GROUP_TAGS, *TABLES, "Modality", *PADDING]
for _color in ("Red", "Green", "Blue"):
    _TAGS += [f"{_color}PaletteColorLookupTable{part}" for part in ("Descriptor", "Data")]
    _TAGS += [f"Segmented{_color}PaletteColorLookupTableData"]

# It reports each deviation from the standard, and a frame that cannot be decoded with a traceback. A filter for all
# threads, since `warnings.catch_warnings` is for one.
logging.getLogger("pydicom").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", module="pydicom")


class DicomImageFile(ImageFile.ImageFile):
    """A DICOM file. `PIL.Image.open` returns it after `fedssl.datasets.formats.register_formats`."""

    format, format_description = "DICOM", "Digital Imaging and Communications in Medicine"

    def _open(self) -> None:
        assert self.fp is not None
        head = self.fp.read(DICOM_PREAMBLE + len(DICOM_MAGIC))
        is_bare = head.startswith(_BARE[0]) and head[3:4] == _BARE[1]
        if head[DICOM_PREAMBLE:] != DICOM_MAGIC and not is_bare:
            raise SyntaxError("it is not DICOM")  # as Pillow expects of a format
        self.fp.seek(0)
        stream: Any = _Limited(self.fp)
        self._dataset: Any = pydicom.dcmread(stream, specific_tags=_TAGS, stop_before_pixels=True, force=is_bare)
        dataset = self._dataset
        self._pixels = _Pixels(self.fp, dataset)
        self._groups = _Groups(dataset)
        _keep_first_items(dataset)
        _check_header(dataset)
        self._size = int(dataset.Columns), int(dataset.Rows)
        self.n_frames = int(dataset.get("NumberOfFrames") or 1)
        check_count(self.n_frames)
        self._show(0)

    def _show(self, frame: int) -> None:
        """Set the mode and the values of black and white of a frame."""
        self._frame, self._is_loaded, dataset = frame, False, self._dataset
        self._groups.copy(frame, dataset)
        self.info = {WHITE_IS_ZERO: dataset.PhotometricInterpretation == "MONOCHROME1"}
        self.info[MODALITY] = sanitize_line(str(dataset.get("Modality") or ""), max_chars=16)
        if dataset.SamplesPerPixel != 1 or dataset.PhotometricInterpretation == "PALETTE COLOR":
            self._mode = "RGB"
            if dataset.PhotometricInterpretation != "PALETTE COLOR" and (bits := int(dataset.BitsStored)) > 8:
                shape, limits = (self.height, self.width, 3), (0, 2**bits - 1)
                self.info[RASTER] = Raster(shape=shape, load=self._decoded, limits=limits)
            return
        low, high, name = limits_of(dataset)
        self._mode = "F" if (low, high) != (0, 255) or transforms(dataset) else "L"
        if not (-_MAX_LIMIT < low < high < _MAX_LIMIT and high - low > _MIN_RANGE):
            raise ValueError(f"its values of black and white would be {low:g} and {high:g}")
        if self._mode == "F":
            self.info[name] = low, high
            self.info[SIGMOID] = name == FILE_WINDOW and dataset.get("VOILUTFunction") == SIGMOID.upper()

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
                values = eight_bits(values, self._dataset)
            dtype = np.float32 if self.mode == "F" else np.uint8
            self.im = Image.fromarray(np.ascontiguousarray(values.astype(dtype, copy=False))).im
            self._is_loaded = True
        return Image.Image.load(self)

    def _decoded(self) -> np.ndarray:
        try:
            stored = self._pixels.frame(self._frame)
            values = values_of(stored, self._dataset)
        except RuntimeError as error:  # with a list of packages
            syntax = self._dataset.file_meta.TransferSyntaxUID.name
            packages = " ".join(DICOM_DECODERS)
            raise ValueError(f"{syntax} needs a decoder: pip install {packages}; or its frame is damaged") from error
        if values.shape[:2] != self.size[::-1]:
            raise ValueError(f"its frame has {values.shape[1]} x {values.shape[0]} pixels")
        if self.mode == "L" and self.info[WHITE_IS_ZERO]:
            values = 255 - values
        is_beside = None if self.mode == "RGB" else is_beside_image(stored, self._dataset)
        missing = np.float32(np.nan) if self.mode == "F" else values.dtype.type(0)
        return values if is_beside is None else np.where(is_beside, missing, values)


class _Limited:
    """A stream whose header may need `_MAX_READS`, and more for many frames, and that is not read as a whole."""

    def __init__(self, stream: IO[bytes], *, max_bytes: int | None = None) -> None:
        self.seek, self.tell, self._read, self._max_bytes = stream.seek, stream.tell, stream.read, max_bytes
        start = stream.tell()
        self._left, self._in_character_set = _MAX_READS + (stream.seek(0, 2) - start) // _BYTES_PER_READ, False
        stream.seek(start)
        self.start_frame()

    def start_frame(self) -> None:
        """Allow another ``max_bytes``; without them, a value of a header may be as long as the file."""
        self._bytes_left = self._max_bytes
        self._check()

    def _check(self) -> None:
        if self._left < 0:
            raise ValueError("its header or its frame has too many parts")

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            raise ValueError("its transfer syntax is deflated; convert it, e.g. with dcmconv +te")
        self._left -= size if self._in_character_set else 1  # each of its bytes may be a name to look up
        self._check()
        if self._bytes_left is not None:
            self._bytes_left -= size
            if self._bytes_left < 0:
                raise ValueError(f"its frame has more than {self._max_bytes:,} bytes, too many for its pixels")
        content = self._read(size)
        starts = size == 8 and content[:4] in _CHARACTER_SET  # with its kind and its length
        self._in_character_set = starts or (self._in_character_set and size == 4)
        return content


class _Pixels:
    """Frames of a file, of which no more is read than the requested one."""

    def __init__(self, stream: IO[bytes], dataset: Any) -> None:
        """Begin at the position of the stream, the element with the pixels."""
        self._stream: Any = stream
        self._dataset = dataset
        is_implicit, is_little = dataset.original_encoding
        if dataset.file_meta.get("TransferSyntaxUID") is None:  # of old files
            syntaxes = {(True, True): ImplicitVRLittleEndian, (False, True): ExplicitVRLittleEndian}
            dataset.file_meta.TransferSyntaxUID = syntaxes.get((is_implicit, is_little), ExplicitVRBigEndian)
        order, start, head = "<" if is_little else ">", stream.tell(), stream.read(12)
        is_explicit = head[4:6] in _KINDS  # some files are not as their syntax states
        group, element = struct.unpack(order + "HH", head[:4].ljust(4, b"\0"))
        self._keyword = _PIXELS.get(group << 16 | element, "")
        if not self._keyword or "Rows" not in dataset or len(head) < 12:
            raise ValueError("it has no pixels")
        self._kind = head[4:6].decode("ascii") if is_explicit else "OW"
        if self._keyword in _FLOATS:
            dataset.pop("BitsStored", None)  # as the standard has it; its absence means floats
        self._start = start + (12 if is_explicit else 8)
        declared = struct.unpack_from(order + "I", head, 8 if is_explicit else 4)[0]
        self._length = min(declared, stream.seek(0, 2) - self._start)
        self._frames = Successive(self._encoded_frames)

    def frame(self, number: int) -> np.ndarray:
        """Decode a frame, as it is stored but for YBR, which becomes RGB."""
        dataset, stream, start = self._dataset, self._stream, self._start
        syntax = dataset.file_meta.TransferSyntaxUID
        if syntax.is_encapsulated:
            return pixel_array(_only_frame(dataset, self._frames[number]), index=0)
        bits = int(dataset.Rows) * int(dataset.Columns) * int(dataset.SamplesPerPixel) * int(dataset.BitsAllocated)
        bits = bits * 2 // 3 if dataset.PhotometricInterpretation == "YBR_FULL_422" else bits
        if (number + 1) * bits > 8 * self._length:
            raise ValueError(f"the number of bytes of pixel data is less than expected ({self._length:,} bytes)")
        options: Any = {"pixel_keyword": self._keyword, "pixel_vr": self._kind, "transfer_syntax_uid": syntax}
        stream.seek(start)
        return get_decoder(syntax).as_array(stream, index=number, **as_pixel_options(dataset), **options)[0]

    def _encoded_frames(self) -> Iterator[bytes]:
        """Yield the encoded frames."""
        if self._keyword in _FLOATS:
            raise ValueError("it has encoded floats")
        self._stream.seek(self._start + 4)
        if int.from_bytes(self._stream.read(4), "little") > _MAX_VALUE:
            raise ValueError("its offset table is too long")
        self._stream.seek(self._start)
        dataset = self._dataset
        pixels = int(dataset.Rows) * int(dataset.Columns) * int(dataset.SamplesPerPixel)
        stream: Any = _Limited(self._stream, max_bytes=_BYTES_PER_VALUE * pixels + 2**20)
        for parts in generate_fragmented_frames(stream, number_of_frames=int(dataset.get("NumberOfFrames") or 1)):
            stream.start_frame()  # also raises what pydicom has caught
            yield b"".join(parts)


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
    for name in TABLES:
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
    for element in dataset.elements():
        size = len(element.value or b"") if isinstance(element, RawDataElement) else 0
        if size > _MAX_VALUE:
            raise ValueError(f"the value of its tag {element.tag} has {size:,} bytes")


def _check_header(dataset: Any) -> None:
    """Raise a `ValueError` for values that would need too much memory, or give other pixels than those of the file."""
    _check_lengths(dataset)
    if "BitsStored" in dataset and int(dataset.get("HighBit") or 0) >= int(dataset.BitsStored):
        raise ValueError(f"its HighBit is {dataset.HighBit}, above BitsStored={dataset.BitsStored}; convert it")
    for name in ("Red", "Green", "Blue"):
        table = dataset.get(f"Segmented{name}PaletteColorLookupTableData")
        if table:
            check_segments(table, wide=dataset.RedPaletteColorLookupTableDescriptor[2] > 8)


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
