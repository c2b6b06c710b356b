"""DICOM files as a format of Pillow, read by pydicom: the first frame, in gray or RGB.

Gray values are those after the modality transformation (rescale slope and intercept, such as Hounsfield units), in mode
F, or in mode L if they have 8 bits and no transformation. ``info`` has:

- ``window``: the lowest and the highest value of the file's first window (VOI), if it has one, see PS3.3 C.11.2.1.2;
- ``range``: otherwise, the lowest and the highest value that its bits can hold;
- ``white_is_zero``: whether the file has MONOCHROME1, for mode F. In mode L white is 255.

Nothing else of the file is read, such as names of patients. Pixels need no more memory than rows times columns: a frame
that declares another size than its file is rejected before it is decoded, and so are files that are deflated as a
whole.
"""

import logging
import struct
import warnings
from typing import IO, Any

import numpy as np
import pydicom
from PIL import Image, ImageFile
from pydicom.encaps import get_frame
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi
from pydicom.pixels.utils import pixel_array

from fedssl.datasets.formats import DICOM_MAGIC, DICOM_PREAMBLE
from fedssl.datasets.pixels import BIT_RANGE, FILE_WINDOW, WHITE_IS_ZERO

FORMAT = "DICOM"
_DEFLATED = "1.2.840.10008.1.2.1.99"
_RLE = "1.2.840.10008.1.2.5"
_LONG = (b"OB", b"OW", b"SQ", b"UN", b"UT")  # kinds of values whose length has 32 bits
_FLOAT_PIXELS = ("FloatPixelData", "DoubleFloatPixelData")
_SIZES = {0xFFF7, *range(0xFFC0, 0xFFD0)} - {0xFFC4, 0xFFC8, 0xFFCC}  # markers of JPEG-LS and JPEG with a frame's size
_VALUE_BYTES = 4  # of a run-length encoded value, at most
_TAGS = ["Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames"]
_TAGS += ["BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData", *_FLOAT_PIXELS]
_TAGS += ["RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"]
_TAGS += ["VOILUTSequence", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"]
_TAGS += ["ExtendedOffsetTable", "ExtendedOffsetTableLengths"]
for _color in ("Red", "Green", "Blue"):
    _TAGS += [f"{_color}PaletteColorLookupTable{part}" for part in ("Descriptor", "Data")]
    _TAGS += [f"Segmented{_color}PaletteColorLookupTableData"]

logging.getLogger("pydicom").setLevel(logging.ERROR)  # it reports each deviation from the standard


class DicomImageFile(ImageFile.ImageFile):
    """A DICOM file. `PIL.Image.open` returns it after `register`."""

    format, format_description = FORMAT, "Digital Imaging and Communications in Medicine"

    def _open(self) -> None:
        assert self.fp is not None
        if self.fp.read(DICOM_PREAMBLE + len(DICOM_MAGIC))[DICOM_PREAMBLE:] != DICOM_MAGIC:
            raise SyntaxError("it is not DICOM")  # as Pillow expects of a format
        if _DEFLATED in _transfer_syntaxes(self.fp):
            raise ValueError("its transfer syntax is deflated; convert it, e.g. with dcmconv +te")
        self.fp.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._dataset: Any = pydicom.dcmread(self.fp, specific_tags=_TAGS)
        dataset = self._dataset
        if not any(name in dataset for name in (*_FLOAT_PIXELS, "PixelData")) or "Rows" not in dataset:
            raise ValueError("it has no pixels")
        _add_functional_groups(dataset)
        self._size = int(dataset.Columns), int(dataset.Rows)
        self.n_frames = int(dataset.get("NumberOfFrames") or 1)
        self.info[WHITE_IS_ZERO] = dataset.PhotometricInterpretation == "MONOCHROME1"
        if dataset.SamplesPerPixel != 1 or dataset.PhotometricInterpretation == "PALETTE COLOR":
            self._mode = "RGB"
            return
        low, high, name = _limits(dataset)
        self._mode = "F" if (low, high) != (0, 255) or _transforms(dataset) else "L"
        if self._mode == "F":
            self.info[name] = low, high

    def load(self) -> Any:
        """Decode the first frame."""
        if self._dataset is not None:
            _check_frame(self._dataset)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    values = _values(self._dataset)
                except RuntimeError as error:  # with a list of packages
                    syntax = self._dataset.file_meta.TransferSyntaxUID.name
                    raise ValueError(f"{syntax} needs a decoder: pip install pylibjpeg pylibjpeg-libjpeg") from error
            if values.shape[:2] != self.size[::-1]:
                raise ValueError(f"its frame has {values.shape[1]} x {values.shape[0]} pixels")
            if self.mode == "RGB":
                values = _eight_bits(values, self._dataset)
            elif self.mode == "L" and self.info[WHITE_IS_ZERO]:
                values = 255 - values
            dtype = np.float32 if self.mode == "F" else np.uint8
            self.im = Image.fromarray(np.ascontiguousarray(values.astype(dtype, copy=False))).im
            self._dataset = None
        return Image.Image.load(self)


def register() -> None:
    """Let `PIL.Image.open` read DICOM."""
    Image.register_open(FORMAT, DicomImageFile)


def _transfer_syntaxes(stream: IO[bytes]) -> set[str]:
    """Return the transfer syntaxes in the file's meta information, which follows; more than one is malformed."""
    found = set()
    while len(header := stream.read(8)) == 8:
        group, element, kind, length = struct.unpack("<HH2sH", header)
        if group != 2:
            break
        if kind in _LONG:
            (length,) = struct.unpack("<I", stream.read(4))
        value = stream.read(length)
        if element == 0x10:
            found.add(value.rstrip(b"\0 ").decode("ascii", "replace"))
    return found


def _add_functional_groups(dataset: Any) -> None:
    """Copy the window and the rescale of the first frame of an enhanced image to where other images have them."""
    for groups in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        for first in dataset.get(groups, [])[:1]:
            for group in ("FrameVOILUTSequence", "PixelValueTransformationSequence"):
                for item in first.get(group, [])[:1]:
                    dataset.update(item)


def _transforms(dataset: Any) -> bool:
    """Return whether the stored values differ from those of the modality, or from those to show."""
    if any(dataset.get(name) for name in ("ModalityLUTSequence", "VOILUTSequence", "WindowWidth")):
        return True
    return (dataset.get("RescaleSlope") or 1, dataset.get("RescaleIntercept") or 0) != (1, 0)


def _limits(dataset: Any) -> tuple[float, float, str]:
    """Return the values of black and white, and their key in ``info``."""
    center, width = (_first(dataset.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if center is not None and width is not None and width >= 1:
        if dataset.get("VOILUTFunction") in ("LINEAR_EXACT", "SIGMOID"):
            return center - width / 2, center + width / 2, FILE_WINDOW
        return center - 0.5 - (width - 1) / 2, center - 0.5 + max(width - 1, 1) / 2, FILE_WINDOW
    if dataset.get("VOILUTSequence"):
        return 0.0, 2.0 ** dataset.VOILUTSequence[0].LUTDescriptor[2] - 1, FILE_WINDOW
    if dataset.get("ModalityLUTSequence"):
        return 0.0, 2.0 ** dataset.ModalityLUTSequence[0].LUTDescriptor[2] - 1, BIT_RANGE
    if "PixelData" not in dataset:
        return 0.0, 1.0, BIT_RANGE
    bits, signed = int(dataset.BitsStored), bool(dataset.PixelRepresentation)
    stored = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)
    slope, intercept = float(dataset.get("RescaleSlope") or 1), float(dataset.get("RescaleIntercept") or 0)
    low, high = sorted(slope * value + intercept for value in stored)
    return low, high, BIT_RANGE


def _first(value: Any) -> float | None:
    """Return the first value of a tag that may have several."""
    if value is None or isinstance(value, str):
        return None
    values = list(value) if hasattr(value, "__iter__") else [value]
    return float(values[0]) if values else None


def _check_frame(dataset: Any) -> None:
    """Raise a `ValueError` if the first encoded frame may need more memory than the declared size."""
    if "PixelData" not in dataset or not dataset.file_meta.TransferSyntaxUID.is_encapsulated:
        return
    frame = get_frame(dataset.PixelData, 0, number_of_frames=int(dataset.get("NumberOfFrames") or 1))
    rows, columns = int(dataset.Rows), int(dataset.Columns)
    if dataset.file_meta.TransferSyntaxUID == _RLE:
        most = 2 * _VALUE_BYTES * rows * columns * int(dataset.SamplesPerPixel) + 2**12
        if len(frame) > most:
            raise ValueError(f"its frame has {len(frame):,} bytes of run lengths, more than {most:,}")
        return
    declared = _codestream_size(frame)
    if declared != (rows, columns):
        raise ValueError(f"its frame has another size {declared} than its header {(rows, columns)}")


def _codestream_size(frame: bytes) -> tuple[int, int] | None:
    """Return the rows and columns of a JPEG, JPEG-LS or JPEG 2000 frame; None if they are not found."""
    siz = frame.find(b"\xff\x4f\xff\x51", 0, 2**12)  # start of a JPEG 2000 codestream, maybe in a JP2 file
    if siz >= 0:
        right, bottom, left, top = struct.unpack_from(">IIII", frame, siz + 8)
        return bottom - top, right - left
    position = 2
    while position + 9 <= len(frame):
        marker, length = struct.unpack_from(">HH", frame, position)
        if marker in _SIZES:
            rows, columns = struct.unpack_from(">HH", frame, position + 5)
            return rows, columns
        position += 2 + length if marker != 0xFFFF else 1
    return None


def _values(dataset: Any) -> np.ndarray:
    """Return the first frame, ``(rows, columns)`` after the modality transformation, or RGB ``(rows, columns, 3)``."""
    values = pixel_array(dataset, index=0)  # YBR becomes RGB
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        return apply_color_lut(values, dataset)
    if values.ndim == 3:
        return values
    values = apply_modality_lut(values, dataset)
    if dataset.get("VOILUTSequence") and not dataset.get("WindowWidth"):
        values = apply_voi(values, dataset)
    return values


def _eight_bits(values: np.ndarray, dataset: Any) -> np.ndarray:
    """Return the upper 8 bits of the values of a color image."""
    bits = int(dataset.BitsStored)
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        bits = int(dataset.RedPaletteColorLookupTableDescriptor[2])
    return values if bits == 8 else values.astype(np.float64) * (255.999 / (2**bits - 1))
