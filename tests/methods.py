"""The methods, and what they need to run on the digits."""

from fedssl.config.overrides import CONF

METHODS = sorted(file.stem for file in (CONF / "method").glob("*.yaml"))
VIT = ["encoder=vit_tiny", "encoder.patch=1", "encoder.width=16", "encoder.depth=2", "encoder.heads=2"]
# Methods that hide patches of their views need a vision transformer and a recipe with masks.
MASKED: dict[str, list[str]] = {
    "ibot": [*VIT, "augmentation=digits_ibot"],
    "ijepa": [*VIT, "augmentation=digits_ijepa"],
    "mae": [*VIT, "encoder.patch=2", "augmentation=digits_mae"],
}
WHOLE = [name for name in METHODS if name not in MASKED]


def overrides_of(method: str) -> list[str]:
    """Return overrides that select the method with an encoder and an augmentation that it accepts."""
    return [f"method={method}", *MASKED.get(method, [])]
