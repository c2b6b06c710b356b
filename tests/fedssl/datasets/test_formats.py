"""Formats that need a package: what is said without it."""

import subprocess
import sys

import nibabel
import numpy as np
import pytest

from fedssl.datasets import formats
from fedssl.datasets.decoding import Decoding
from fedssl.errors import InputError
from tests.fedssl.datasets.made import tiff

NIFTI = nibabel.Nifti1Image(np.zeros((4, 4, 1), np.uint8), np.eye(4)).to_bytes()
TIFF = tiff(np.zeros((6, 6, 13), np.uint16), photometric="minisblack", planarconfig="contig")


@pytest.mark.parametrize(("name", "content", "channels"), [("nifti", NIFTI, 1), ("tiff", TIFF, 13)])
def test_an_image_names_the_package_that_it_needs(monkeypatch, name, content, channels):
    monkeypatch.setattr(formats, "INSTALLED", frozenset())
    package = formats.PACKAGES[name.upper()]
    with pytest.raises(InputError, match=f"{name.upper()} images of this kind need {package} .uv sync --extra {name}"):
        Decoding(channels=channels, size=4)(content)


def test_ignored_files_name_the_packages_that_they_need(monkeypatch):
    monkeypatch.setattr(formats, "INSTALLED", frozenset({"HEIF"}))
    ignored = {".dcm": 3, ".ima": 1, ".nii.gz": 3, ".mp4": 1, ".webm": 1, ".mpg": 1, ".heic": 9, ".txt": 5}
    assert formats.missing_packages(ignored) == [
        (count, f"{name.upper()} images need {package} (uv sync --extra {name}, or pip install 'fedssl[{name}]')")
        for count, name, package in ((4, "dicom", "pydicom"), (3, "nifti", "nibabel"), (3, "video", "av"))
    ]


def test_without_torch_a_package_is_installed_alone(monkeypatch):
    monkeypatch.setattr(formats, "INSTALLED", frozenset())
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"TIFF images of this kind need tifffile \(pip install tifffile\)$"):
        Decoding(channels=13, size=4)(TIFF)


def test_only_the_first_file_of_dicom_imports_its_package():
    code = "import sys, fedssl.datasets.decoding; print('pydicom' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
