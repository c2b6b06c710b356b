"""Undocumented names of Hydra 1.3: parsing and applying overrides."""

from collections.abc import Sequence

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from omegaconf import DictConfig

__all__ = ["ChoiceSweep", "Glob", "Override", "apply_overrides", "parse_overrides"]


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar; raise `HydraException` if one is invalid."""
    return OverridesParser.create().parse_overrides(list(overrides))


def apply_overrides(overrides: Sequence[Override], config: DictConfig) -> None:
    """Set the values of ``overrides`` in a composed config."""
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), config)
