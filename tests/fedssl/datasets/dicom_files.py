"""DICOM files with known values, and those of pydicom, which scanners made."""

import io
from pathlib import Path

import numpy as np
import pydicom
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import EnhancedCTImageStorage, ExplicitVRLittleEndian

from fedssl.datasets.decoding import Decoding
from fedssl.datasets.pages import open_pages

RAMP = np.array([[0, 1], [1000, 4095]])
FILES = {file.stem: file for file in (Path(pydicom.__file__).parent / "data" / "test_files").glob("*.dcm")}


def make(values: np.ndarray = RAMP, *, bits: int = 12, signed: bool = False, **tags: object) -> bytes:
    """A file with these values; a keyword is a tag."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = EnhancedCTImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = "1.2.3"
    dataset.PatientName = "Doe^Jane"
    dataset.Rows, dataset.Columns = values.shape[:2]
    dataset.SamplesPerPixel = 3 if values.ndim == 3 else 1
    dataset.PhotometricInterpretation = "RGB" if values.ndim == 3 else "MONOCHROME2"
    if values.ndim == 3:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = 8 if bits <= 8 else 16
    dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = bits, bits - 1, int(signed)
    kind = np.dtype(("<i" if signed else "<u") + str(dataset.BitsAllocated // 8))
    content = values.astype(kind).tobytes()
    dataset.PixelData = content + bytes(len(content) % 2)
    dataset["PixelData"].VR = "OW"
    for name, value in tags.items():
        if name == "TransferSyntaxUID":
            dataset.file_meta.TransferSyntaxUID = value
        else:
            setattr(dataset, name, value)
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def item(**tags: object) -> Dataset:
    dataset = Dataset()
    for name, value in tags.items():
        setattr(dataset, name, value)
    return dataset


def levels(content: bytes, **settings: object) -> list[list[int]]:
    return Decoding(channels=1, size=2, dtype="uint8", **settings)(content)[0].tolist()


def opened(content: bytes | str) -> tuple[Image.Image, np.ndarray]:
    with open_pages(content, max_pixels=10**7, channels=1) as pages:
        image = pages.page(0)
        return image, np.asarray(image)


def stack(frames: np.ndarray, **tags: object) -> bytes:
    """A file with several frames ``(n, rows, columns)``."""
    values = frames.astype("<u2")
    return make(values[0], NumberOfFrames=len(values), PixelData=values.tobytes(), **tags)


def windows(*centers: float) -> Sequence:
    """Groups of frames with windows of the width 401: center - 200.5 to center + 199.5."""
    window = [{"WindowCenter": str(center), "WindowWidth": "401"} for center in centers]
    return Sequence([item(FrameVOILUTSequence=Sequence([item(**tags)])) for tags in window])


def palette(values=RAMP // 16, *, bits: int = 8, stated: int = 16, part: str = "", **tags: bytes) -> bytes:
    """A file with the same table for each color."""
    for color in ("Red", "Green", "Blue"):
        tags[f"{color}PaletteColorLookupTableDescriptor"] = [256, 0, stated]
        tags[f"{part}{color}PaletteColorLookupTableData"] = tags["table"]
    del tags["table"]
    return make(values, bits=bits, PhotometricInterpretation="PALETTE COLOR", **tags)
