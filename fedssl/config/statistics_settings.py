"""Settings of the statistics of the clients' images, and their request, ``dataset.mean=federated``.

The word stands for mean and standard deviation, whichever has it. The config then has numbers that change no pixel, and
an empty `statistics.measured`, until the clients have replied.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedssl.errors import InputError

FEDERATED = "federated"
KEYS = ("dataset.mean", "dataset.std")


@dataclass(frozen=True, kw_only=True)
class StatisticsSettings:
    """Statistics of the clients' images."""

    max_clients: int | None  # that are asked; None: all
    measured: Mapping[str, Any] | None  # None: not requested; empty: not measured yet

    @property
    def are_missing(self) -> bool:
        return self.measured is not None and not self.measured


def request_statistics(config: DictConfig, *, explicit: Collection[str]) -> None:
    """Replace the word in a composed config by numbers, and note the request; raises `InputError` for a word alone."""
    words = [key for key in KEYS if OmegaConf.select(config, key) == FEDERATED]
    if not words:
        return
    for key in KEYS:
        if key not in words and key in explicit:
            raise InputError(
                f"{words[0]}={FEDERATED} measures mean and standard deviation, but {key} is set to "
                f"{OmegaConf.select(config, key)}; leave {key} out, or set both to numbers"
            )
    channels = config.dataset.channels if isinstance(config.dataset.channels, int) else 1
    for key, value in zip(KEYS, (0.0, 1.0), strict=True):
        OmegaConf.update(config, key, [value] * channels, merge=False)
    OmegaConf.update(config, "statistics.measured", {}, merge=False)


def without_requests(overrides: Collection[str]) -> list[str]:
    """Return the overrides other than requests, for a resumed run, which has been measured."""
    return [word for word in overrides if word not in {f"{key}={FEDERATED}" for key in KEYS}]


def measured_keys(saved: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the settings that a saved run has measured: the statistics, and what follows them."""
    node = (saved or {}).get("statistics")
    is_measured = isinstance(node, Mapping) and node.get("measured")
    return (*KEYS, "augmentation.mean", "augmentation.std", "statistics.measured") if is_measured else ()
