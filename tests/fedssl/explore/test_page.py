"""The page as text: its data, hostile names and labels, duplicates, and few images."""

import json
import re
from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from fedssl.explore.columns import Column, coded, column_of
from fedssl.explore.images import Collected, Sheets, thumbnail_size
from fedssl.explore.page import Gallery, equal_images, make_page

HOSTILE = "<img src=x onerror=alert(1)>.png"
HOSTILE_LABEL = "</script><script>alert(2)</script>"


def collected(n: int = 30, *, seed: int = 0, columns: list[Column] | None = None) -> Collected:
    """Images of three groups; the first two have equal pixels and features, the first has a hostile name."""
    generator = np.random.default_rng(seed)
    group = np.arange(n) % 3
    features = (4 * np.eye(3, 8)[group] + 0.3 * generator.normal(size=(n, 8))).astype(np.float32)
    pixels = generator.integers(256, size=(n, 3, 8, 8), dtype=np.uint8)
    if n > 1:
        features[1], pixels[1] = features[0], pixels[0]
    sheets = Sheets(n, thumbnail_size(n), (0, 1, 2))
    sheets.add(pixels)
    sheets.finish()
    labels = coded("label", np.where(np.arange(n) % 5 == 4, -1, group), ["cat", "dog", HOSTILE_LABEL])
    return Collected(
        names=[HOSTILE, *(f"folder/{number}.png" for number in range(1, n))],
        features=features,
        columns=[labels, column_of("=site", [f"=1+{row % 2}" for row in range(n)])] if columns is None else columns,
        sheets=sheets,
        digests=[image.tobytes() for image in pixels],
        warning="",
    )


def page_of(n: int = 30, *, threshold: float = 0.95, clusters: int | None = None, **changes: Any) -> str:
    gallery = Gallery(source="photos", encoder="my-run", images=collected(n, **changes), size=8, notes=["A note."])
    return make_page(gallery, projection="pca", clusters=clusters, threshold=threshold)


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(match[1])


def test_hostile_text_is_data_and_no_markup():
    page = page_of()
    assert HOSTILE not in page
    assert HOSTILE_LABEL not in page
    assert page.count("<script") == page.count("</script>") == 2
    data = data_of(page)
    assert data["names"][0] == HOSTILE
    assert HOSTILE_LABEL in data["columns"][0]["values"]
    assert "default-src 'none'" in page


def test_numbers_are_those_of_the_images():
    data = data_of(page_of())
    neighbors = np.frombuffer(b64decode(data["neighbors"]), "<u4").reshape(30, 10)
    assert neighbors[0, 0] == 1
    group = np.array([0, 0, *(row % 3 for row in range(2, 30))])
    assert (group[neighbors] == group[:, None])[:, :8].all()  # the smallest group has nine images
    cosines = np.frombuffer(b64decode(data["cosines"]), "<f4").reshape(30, 10)
    assert cosines[0, 0] == pytest.approx(1)
    assert np.frombuffer(b64decode(data["points"]), "<f4").reshape(30, 2).max() <= 1
    assert [column["title"] for column in data["columns"]] == ["label", "=site", "cluster", "outlier"]
    clusters = np.frombuffer(b64decode(data["columns"][2]["codes"]), "<u4")
    assert np.bincount(clusters).tolist() == [11, 10, 9]
    assert len(data["atlas"]["sheets"]) == 1


def test_equal_images_are_a_group_and_no_near_pair():
    data = data_of(page_of(threshold=0.9))
    assert data["groups"] == [[0, 1]]
    assert data["pairs"]
    assert not any({0, 1} <= {first, second} or 1 in (first, second) for first, second, _ in data["pairs"])
    assert data["captions"]["duplicates"].startswith("Groups of images with equal pixels at 8 x 8: 1. ")


def test_equal_images_are_grouped_by_size():
    assert equal_images(["a", "b", "c", "b", "a", "b"]) == [[1, 3, 5], [0, 4]]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_images_have_a_page(n: int):
    data = data_of(page_of(n))
    assert len(data["names"]) == n
    assert len(b64decode(data["neighbors"])) == 4 * n * (n - 1)
    assert data["groups"] == ([] if n == 1 else [[0, 1]])


def test_a_page_is_a_pure_function_of_its_images():
    assert page_of() == page_of()


def test_most_unusual_images_have_a_column():
    data = data_of(page_of(200))
    codes = np.frombuffer(b64decode(data["columns"][3]["codes"]), "<u4")
    unusual = np.frombuffer(b64decode(data["unusual"]), "<f4")
    assert np.bincount(codes).tolist() == [2, 8, 30, 160]  # 1, 4, 15 and 80 percent
    assert unusual[codes == 0].min() >= unusual[codes == 1].max()
