"""Malicious DICOM files, which cost little and are unreadable."""

import struct
import zlib
from functools import cache

import numpy as np
import pytest
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.uid import DeflatedExplicitVRLittleEndian, JPEG2000Lossless, JPEGBaseline8Bit, RLELossless

from fedssl.datasets.decoding import Decoding, Page
from tests.fedssl.datasets import made
from tests.fedssl.datasets.dicom_files import RAMP, make, opened, palette

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


def jpeg2000(size: int) -> bytes:
    """A codestream that declares this height and width."""
    content = bytearray(made.encoded(Image.new("L", (8, 8)), "JPEG2000", irreversible=False, no_jp2=True))
    struct.pack_into(">II", content, content.index(b"\xff\x51") + 6, size, size)
    return bytes(content)


def encoded(syntax: str, *frames: bytes, **tags: object) -> bytes:
    return make(RAMP // 16, bits=8, TransferSyntaxUID=syntax, PixelData=encapsulate(list(frames)), **tags)


def element(tag: int, kind: bytes, content: bytes) -> bytes:
    """An element whose length has 32 bits."""
    return struct.pack("<HH2sHI", tag >> 16, tag & 0xFFFF, kind, 0, len(content)) + content


def with_element(content: bytes) -> bytes:
    """A file with an element before its rows."""
    plain = make()
    start = plain.index(b"\x28\x00\x10\x00US")
    return plain[:start] + content + plain[start:]


def deflated(megabytes: int, further: bytes = b"") -> bytes:
    """A file whose data set expands to this size, with a second, harmless transfer syntax before the first."""
    plain = make()
    start = 132
    meta = further + b"\x02\x00\x10\x00UI" + struct.pack("<H", 20) + b"1.2.840.10008.1.2.1\0"
    meta += b"\x02\x00\x10\x00UI" + struct.pack("<H", 22) + DeflatedExplicitVRLittleEndian.encode()
    return plain[:start] + meta + deflated_zeros(megabytes)


@cache
def deflated_zeros(megabytes: int) -> bytes:
    return zlib.compress(bytes(2**20 * megabytes), 9, -zlib.MAX_WBITS)


SOC_SIZ = b"\xff\x4f\xff\x51" + struct.pack(">HHIIII", 41, 0, 2, 2, 0, 0)  # declares 2 x 2
SOF = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, 2, 2, 1) + b"\1\x11\0"  # as well
JPEG = made.encoded(Image.new("L", (300, 300)), "JPEG")
COMMENT = b"\xff\xfe" + struct.pack(">H", 2 + len(SOC_SIZ)) + SOC_SIZ
BOX = struct.pack(">I4s", 12, b"jP  ") + bytes(4) + struct.pack(">I4s", 8 + len(SOC_SIZ), b"free") + SOC_SIZ
JP2 = BOX + struct.pack(">I4s", 0, b"jp2c") + jpeg2000(60_000)
OFFSETS = {name: struct.pack("<QQ", 999, 0) for name in ("ExtendedOffsetTable", "ExtendedOffsetTableLengths")}
RUNS = struct.pack("<16I", 1, 64, *[0] * 14) + b"\x81\0" * 2**20  # 128 MiB
EMPTY_ITEM = struct.pack("<HHI", 0xFFFE, 0xE000, 0)
BOMB = np.array([0, 1, 5] + [1, 65535, 9, 1, 65535, 7] * 100, "<u2").tobytes()
FLOATS = encoded(JPEG2000Lossless, jpeg2000(2)).replace(b"\xe0\x7f\x10\x00OW", b"\xe0\x7f\x08\x00OF")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (deflated(64), "its transfer syntax is deflated"),
        (deflated(64, element(0x00020009, b"OF", bytes(4))), "its transfer syntax is deflated"),
        (make(Rows=8_000, Columns=8_000), "8,000 x 8,000 pixels, more than dataset.max_pixels"),
        (
            encoded(JPEG2000Lossless, jpeg2000(60_000)),
            r"its frame has another size \(60000, 60000\) than its header \(2, 2\)",
        ),
        (encoded(JPEG2000Lossless, JP2), r"another size \(60000, 60000\) than"),
        (encoded(JPEGBaseline8Bit, JPEG[:2] + COMMENT + JPEG[2:]), r"another size \(300, 300\) than"),
        (encoded(JPEGBaseline8Bit, JPEG[:2] + SOF + JPEG[2:]), r"another size \(2, 2\), \(300, 300\) than"),
        (encoded(JPEGBaseline8Bit, JPEG[:2] + b"\xff\xd0" + JPEG[2:]), "another size none than"),
        (FLOATS, "it has encoded floats"),
        (make(TransferSyntaxUID=RLELossless, PixelData=encapsulate([bytes(2**20)])), "bytes of run lengths, more than"),
        (encoded(RLELossless, RUNS, Rows=1024, Columns=1024), "its run lengths expand to more than its pixels"),
        (make(TransferSyntaxUID=JPEG2000Lossless, PixelData=EMPTY_ITEM * 2**18), "too many parts"),
        (with_element(b"\x09\0\x10\0SQ\0\0" + b"\xff" * 4 + EMPTY_ITEM * 2**17), "too many parts|No tag to read"),
        (with_element(element(0x00080005, b"UT", b"a\\" * 2**20)), "too many parts"),
        (with_element(element(0x00281050, b"UN", b"1\\" * 2**20)), "has 2,097,152 bytes"),
        (palette(table=BOMB, part="Segmented"), "its segmented palette is indirect or too long"),
        (palette(table=np.array([0, 1, 5, 2, 1, 0, 0], "<u2").tobytes(), part="Segmented"), "is indirect or too long"),
        (make(RescaleSlope="0", RescaleIntercept="5"), "its values of black and white would be 5 and 5"),
        (make(RescaleSlope="1e300", RescaleIntercept="0"), "would be 0 and 4.095e"),
        (make(WindowCenter="40", WindowWidth="inf"), "would be -inf and inf"),
        (with_element(element(0x00281050, b"UN", b"x" * 2**17) + element(0x00281051, b"UN", b"4 ")), "convert"),
        (make(NumberOfFrames=2**31 - 1), "it has 2,147,483,647 images, and 1,048,576 are the maximum"),
        (make()[:200], ""),
        (make(PixelData=bytes(2)), "number of bytes of pixel data is less than expected"),
    ],
)
def test_malicious_files_are_unreadable(content, reason):
    with pytest.raises(Exception, match=reason):
        Decoding(channels=1, size=2)(content)


def test_the_checked_frame_is_the_decoded_one():
    values = np.array([[9, 8], [7, 6]], np.uint8)
    frame = made.encoded(Image.fromarray(values), "JPEG2000", irreversible=False, no_jp2=True)
    content = encoded(JPEG2000Lossless, frame, jpeg2000(60_000), NumberOfFrames=2, **OFFSETS)
    assert opened(content)[1].tolist() == values.tolist()


def test_every_frame_is_checked_before_it_is_decoded(tmp_path):
    good = jpeg2000(2)
    content = encoded(JPEG2000Lossless, good, jpeg2000(60_000), good, NumberOfFrames=3)
    (tmp_path / "a.dcm").write_bytes(content)
    found = list(Decoding(channels=1, size=2).each(Page(tmp_path / "a.dcm", number) for number in range(3)))
    assert "another size (60000, 60000) than" in str(found[1])
