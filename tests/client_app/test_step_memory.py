"""The estimate of a training step's memory: it needs neither tensors nor torch's compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

from client_app import step_memory
from client_app.step_memory import estimate_step_memory
from fedssl.config.compose import resolve_config
from fedssl.config.load import client_settings

ENCODERS = [
    ["encoder=conv_small"],
    ["encoder=conv_small", "encoder.norm=group", "dataset.size=33"],
    ["encoder=resnet18"],
    ["encoder=resnet18", "encoder.stem=imagenet", "dataset.size=65"],
    ["encoder=resnet50", "encoder.norm=group", "encoder.stem=imagenet"],
]
PROGRAM = """
import sys
from client_app.step_memory import estimate_step_memory
from pathlib import Path
from fedssl.config.compose import resolve_config
from fedssl.config.load import client_settings
for encoder in ("conv_small", "resnet18"):
    config, _ = resolve_config([f"encoder={encoder}", "method=byol"])
    estimate_step_memory(client_settings(config, states=Path(), partition=None), num_images=8)
print(*sys.modules)
"""


@pytest.mark.parametrize("overrides", ENCODERS, ids=" ".join)
def test_shapes_are_those_of_torch(overrides, monkeypatch):
    config, _ = resolve_config(["dataset=image_folder", "dataset.path=none", *overrides])
    settings = client_settings(config, states=Path(), partition=None)
    estimate = estimate_step_memory(settings, num_images=8)
    monkeypatch.setattr(step_memory, "_SHAPES", {})
    assert estimate == estimate_step_memory(settings, num_images=8) > 0


def test_torchs_compiler_is_not_imported():
    loaded = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert {"torch._dynamo", "sympy"}.isdisjoint(loaded)
