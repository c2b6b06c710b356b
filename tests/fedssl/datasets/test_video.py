"""Frames of videos: synthetic ones, whose gray values are their times."""

import io
import math
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from fedssl.datasets.decoding import Decoding, Page, unreadable_reason
from fedssl.datasets.folder import read
from fedssl.datasets.formats import module_of
from fedssl.datasets.pages import open_pages
from tests.fedssl.datasets.made import encoded

ANY = (ValueError, OSError, EOFError)
CONTAINERS = dict.fromkeys(("mp4", "mov", "avi"), "mpeg4")
CONTAINERS |= {"matroska": "ffv1", "webm": "libvpx", "mpeg": "mpeg2video"}
SIZE = 32


def video(
    times: list[float], levels: list[int] | None = None, kind: str = "mp4", codec: str | None = None, **options: object
) -> bytes:
    """A video whose frames at these times have these gray levels; left is black."""
    stream = io.BytesIO()
    with av.open(stream, "w", format=kind) as container:
        track = container.add_stream(codec or CONTAINERS[kind], rate=25)
        track.width, track.height, track.pix_fmt = SIZE, SIZE, str(options.get("pix_fmt", "yuv420p"))
        track.codec_context.gop_size = 10
        track.bit_rate = 10**6
        for time, level in zip(times, levels or [50 + 3 * number for number in range(len(times))], strict=True):
            values = np.full((SIZE, SIZE, 3), level, np.uint8)
            values[:, : SIZE // 2] = 0
            frame = av.VideoFrame.from_ndarray(values, format="rgb24")
            frame.pts, frame.time_base = round(time * 25), Fraction(1, 25)
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return stream.getvalue()


def level(image: np.ndarray) -> int:
    """The gray level of the right half."""
    return round(float(image[0, :, -8:].mean()))


STEADY = [number / 25 for number in range(55)]  # 2.16 s


@pytest.mark.parametrize("kind", CONTAINERS)
def test_frames_at_an_interval_in_any_order(kind, tmp_path):
    (tmp_path / "a").write_bytes(video(STEADY, kind=kind))
    decoding = Decoding(channels=1, size=SIZE, video_interval=0.4)  # each tenth frame
    with open_pages(tmp_path / "a", max_pixels=10**6, channels=1, video_interval=0.4) as pages:
        assert pages.count == 6
    for numbers in ([0, 1, 2, 3, 4, 5], [5, 0, 3, 3]):
        found = list(decoding.each(Page(tmp_path / "a", number) for number in numbers))
        assert [level(image) for image in found] == pytest.approx([50 + 30 * number for number in numbers], abs=4)
    assert all(image[0, :, :8].max() < 8 for image in found)
    assert level(decoding(Page(tmp_path / "a", 4))) == pytest.approx(170, abs=4)
    assert isinstance(next(decoding.each([Page(tmp_path / "a", 6)])), EOFError)


def test_a_frame_is_shown_until_the_next_one(tmp_path):
    (tmp_path / "a.mp4").write_bytes(video([0, 0.2, 2.0, 2.2, 3.8], [40, 80, 120, 160, 200]))
    found = Decoding(channels=1, size=SIZE).each(Page(tmp_path / "a.mp4", number) for number in range(4))
    # the first at or after 0, 1, 2 and 3 s
    assert [level(image) for image in found] == pytest.approx([40, 120, 120, 200], abs=4)


def test_later_frames_are_not_decoded_from_the_start(tmp_path, monkeypatch):
    (tmp_path / "a.mp4").write_bytes(video([number / 5 for number in range(500)], [100] * 500))
    from fedssl.datasets import video as module

    times = []
    time = module._time
    monkeypatch.setattr(module, "_time", lambda timed: times.append(1) or time(timed))
    found = list(Decoding(channels=1, size=SIZE).each(Page(tmp_path / "a.mp4", number) for number in (90, 91, 92)))
    assert [level(image) for image in found] == pytest.approx([100] * 3, abs=4)
    assert len(times) <= 30  # of 460: from the key frame before, of which there is one in ten


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_searched_frame_is_the_one_in_order(kind):
    content = video([number / 25 for number in range(250)], [20 + 4 * number // 5 for number in range(250)], kind)

    def frames(numbers: list[int]) -> list[np.ndarray]:
        with open_pages(content, max_pixels=10**6, channels=1, video_interval=0.2) as pages:
            return [np.asarray(pages.page(number)) for number in numbers]

    expected = frames(list(range(49)))
    for number in (48, 20, 33):
        assert np.array_equal(frames([number])[0], expected[number])


def test_rotation():
    plain = video(STEADY)
    start = plain.index(b"tkhd") + 44  # after version, times, track, duration, layer and volume
    one = 1 << 16
    assert struct.unpack_from(">9i", plain, start) == (one, 0, 0, 0, one, 0, 0, 0, 1 << 30)
    turned = bytearray(plain)
    struct.pack_into(">9i", turned, start, 0, one, 0, -one, 0, 0, SIZE << 16, 0, 1 << 30)  # x' = width - y, y' = x
    found = Decoding(channels=1, size=SIZE)(bytes(turned))[0]
    assert found[:8].max() < 8  # left is now above
    assert found[-8:].mean() == pytest.approx(50, abs=4)


@pytest.mark.parametrize(("pix_fmt", "bits"), [("yuv420p10le", 10), ("gray16le", 16)])
def test_more_than_8_bits_are_kept(pix_fmt, bits):
    content = video(STEADY[:2], [101, 101], kind="matroska", codec="ffv1", pix_fmt=pix_fmt)
    found = Decoding(channels=1, size=SIZE)(content)
    assert found.dtype == np.uint16
    assert found[0, :, -8:].mean() / 65535 == pytest.approx(101 / 255, abs=0.01)


def test_a_cut_video_has_the_frames_before(tmp_path):
    content = video(STEADY, kind="matroska")
    (tmp_path / "a.mkv").write_bytes(content[: len(content) // 2])
    decoding = Decoding(channels=1, size=SIZE, video_interval=0.4)
    found = list(decoding.each(Page(tmp_path / "a.mkv", number) for number in range(6)))
    readable = [image for image in found if not isinstance(image, Exception)]
    assert 2 <= len(readable) <= 4
    assert [level(image) for image in readable] == pytest.approx([50, 80, 110, 140][: len(readable)], abs=4)


def sound(kind: str = "mp4") -> bytes:
    stream = io.BytesIO()
    with av.open(stream, "w", format=kind) as container:
        track = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 44100, 0
        container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return stream.getvalue()


def test_containers_by_their_magic_numbers():
    modules = {kind: module_of(video(STEADY[:2], kind=kind)[:512]) for kind in CONTAINERS}
    assert modules == dict.fromkeys(CONTAINERS, "video")
    for name in ("AVIF", "JPEG2000", "WEBP"):
        assert module_of(encoded(Image.new("RGB", (8, 8)), name)[:512]) is None
    assert module_of(b"\0\0\0\x18ftypheic" + bytes(100)) is None


@pytest.mark.parametrize(
    "playlist",
    [
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"v=0\no=- 0 0 IN IP4 1.2.3.4\n",
    ],
)
def test_playlists_are_no_videos(playlist, tmp_path):
    (tmp_path / "a.mp4").write_bytes(playlist)
    with pytest.raises(ANY):
        Decoding(channels=1, size=8)(tmp_path / "a.mp4")


def test_malicious_files_have_a_reason():
    content = video(STEADY[:5])
    nothing = (content[:40], b"\0\0\0\x18ftypmp42" + bytes(99), content[: len(content) // 3])
    for damaged, reason in [*((one, "") for one in nothing), (sound(), "it has no video")]:
        with pytest.raises(ANY) as raised:
            Decoding(channels=1, size=8)(damaged)
        assert reason in unreadable_reason(raised.value)
    with pytest.raises(ANY, match=r"more than dataset.max_pixels|Invalid"):
        Decoding(channels=1, size=8, max_pixels=100)(content)


def test_absurd_times_are_refused():
    gap = video([0, 2_000_000 / 25], [9, 9])
    with open_pages(gap, max_pixels=10**6, channels=1) as pages, pytest.raises(ValueError, match="and its times are"):
        assert pages.count > math.inf


def test_mpeg_is_decoded_once(tmp_path, monkeypatch):
    """50 frames are of several tasks, each of which would decode the file from its start."""
    (tmp_path / "a.mpg").write_bytes(video([number / 25 for number in range(250)], kind="mpeg", levels=[90] * 250))
    from fedssl.datasets import video as module

    opened, decoded = [], module._Frames._decoded
    monkeypatch.setattr(module._Frames, "_decoded", lambda frames: opened.append(1) or decoded(frames))
    made = read("train", channels=1, size=8, limit=None, path=str(tmp_path), folders="none", video_interval=0.2)
    assert len(made.images) == 50
    assert len(opened) < 6  # also for the dtype, and for warnings
