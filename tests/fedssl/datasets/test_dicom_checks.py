"""Sizes in encoded DICOM data are those of the encoder; `test_malicious_dicom` has what the checks refuse."""

import pytest
from PIL import Image

from fedssl.datasets.dicom_checks import codestream_sizes
from tests.fedssl.datasets.made import encoded


@pytest.mark.parametrize(
    ("form", "settings"),
    [("JPEG", {}), ("JPEG", {"progressive": True}), ("JPEG2000", {}), ("JPEG2000", {"no_jp2": True})],
)
def test_sizes_are_those_of_the_encoder(form, settings):
    for height, width in ((1, 300), (40, 7)):
        content = encoded(Image.new("L", (width, height)), form, **settings)
        assert codestream_sizes(content) == {(height, width)}
        assert codestream_sizes(content[:12]) == set()
    assert codestream_sizes(b"") == set()
