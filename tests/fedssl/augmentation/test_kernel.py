"""The kernel that makes views, without a GPU: in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fedssl.augmentation import Augmentation
from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.machine import devices

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed; PyTorch for CUDA brings it")
@pytest.mark.heavy  # Triton's interpreter is slow, and the kernel is off by default
def test_views_of_the_kernel_are_those_of_a_cpu():
    """Compare within 1e-5, in a new process, because Triton selects its interpreter when it is imported."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.fedssl.augmentation.by_kernel"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def made(*, size=8, channels=3, way="triton", **view):
    statistics = {"mean": [0.5] * channels, "std": [0.5] * channels}
    return Augmentation(size=size, views=[{}, view], gpu_augmentation=way, **statistics)


def test_what_the_kernel_does_not_make_is_refused():
    with pytest.raises(InputError, match="^gpu_augmentation=cuda must be torch or triton"):
        compose(["gpu_augmentation=cuda"])
    for wrong, found in (({"size": 65}, "dataset.size=65 with 3"), ({"channels": 2}, "dataset.size=8 with 2 channels")):
        message = f"at most 64 pixels with 1 or 3 channels but {found}.*; set gpu_augmentation="
        with pytest.raises(InputError, match=message):
            made(**wrong)
    message = "triton lacks augmentation.views.1.rotation, .*1.noise_prob; set gpu_augmentation=torch"
    with pytest.raises(InputError, match=message):
        made(rotation=10, noise_prob=0.5)


def test_missing_triton_and_large_images_are_refused_on_gpus(monkeypatch):
    images, generator = torch.zeros(2, 3, 8, 70, dtype=torch.uint8), torch.Generator()
    assert made()(images, generator)[0].images.shape == (2, 3, 8, 8)
    monkeypatch.setattr(devices, "CPU", "none")
    message = "supports images of at most 64 pixels but these have 8x70; set gpu_augmentation=torch"
    with pytest.raises(InputError, match=message):
        made()(images, generator)
    monkeypatch.setattr("fedssl.augmentation.augmentation.find_spec", lambda name: None)
    message = "gpu_augmentation=triton but Triton is not installed; install it, or set gpu_augmentation="
    with pytest.raises(InputError, match=message):
        made()(images[..., :8], generator)


def test_the_setting_reaches_the_views():
    for way in ("torch", "triton"):
        assert compose([f"gpu_augmentation={way}"]).training.augmentation.instantiate().by_kernel == (way == "triton")
