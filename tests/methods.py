"""The methods and regularizers of ``conf/``, and what they need to run on the digits."""

import tempfile
from functools import cache
from pathlib import Path

import pytest

from fedssl.config.overrides import CONF

METHODS = sorted(file.stem for file in (CONF / "method").glob("*.yaml"))
REGULARIZERS = sorted(file.stem for file in (CONF / "regularizer").glob("*.yaml") if file.stem != "none")
VIT = ["encoder=vit_tiny", "encoder.patch=1", "encoder.width=16", "encoder.depth=2", "encoder.heads=2"]
# Methods that hide patches of their views need a vision transformer and a recipe with masks.
MASKED: dict[str, list[str]] = {
    "ibot": [*VIT, "augmentation=digits_ibot"],
    "ijepa": [*VIT, "augmentation=digits_ijepa"],
    "mae": [*VIT, "encoder.patch=2", "augmentation=digits_mae"],
    "mar": [*VIT, "encoder.patch=2", "augmentation=digits_mae"],
}
# Every mechanism of a method once: targets, parts of the server side, local state, masks, targets of images.
TYPICAL = ("byol", "dino", "distillation", "fedca", "mae", "orchestra", "simclr", "swav")
CASES = [pytest.param(name, marks=[] if name in TYPICAL else pytest.mark.heavy) for name in METHODS]
WHOLE = [name for name in METHODS if name not in MASKED]


def overrides_of(method: str) -> list[str]:
    """Return overrides that select the method with an encoder and an augmentation that it accepts."""
    teacher = [f"teacher={teacher_file()}"] if method == "distillation" else []
    return [f"method={method}", *MASKED.get(method, []), *teacher]


_folder = tempfile.TemporaryDirectory()  # until the process ends


@cache
def teacher_file() -> Path:
    """Return the file of an untrained encoder of the digits that differs from those of the tests in its width."""
    return save_teacher(Path(_folder.name) / "encoder.pt", "encoder.width=6", "seed=7")


def save_teacher(file: Path, *overrides: str) -> Path:
    """Save the untrained encoder of a run with these overrides, as its encoder.pt."""
    from fedssl.config.load import compose
    from fedssl.export import save_encoder
    from fedssl.methods.base import build_method

    settings = compose(overrides)
    values, data = settings.model.encoder.values, settings.data
    encoder = build_method(settings.model).encoder
    save_encoder(file, encoder, settings=values, mean=data.mean, std=data.std, metadata={})
    return file
