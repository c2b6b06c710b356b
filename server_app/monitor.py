"""Health of the representation in rounds of evaluation: of the global model, and of every client's as it arrives."""

import logging
from statistics import mean
from typing import Any

import torch
from omegaconf import DictConfig

from fedssl.config import make
from fedssl.datasets.base import load
from fedssl.evaluation.health import Health
from fedssl.exchange import load_layers
from fedssl.layers import Layers
from fedssl.methods.base import SSLMethod

log = logging.getLogger("fedssl")

# Trained encoders lie far above both; a collapsed one is at 0 and at 1.
LEAST_SPREAD, LEAST_RANK = 0.05, 1.5


class Monitor:
    """Measures models on the same pictures of the data set, labelled or not.

    Parameters
    ----------
    settings : DictConfig
        ``health_pictures`` tells on how many pictures; 0 turns the monitor off.
    method : SSLMethod
        Models are loaded into it to be measured.
    device : torch.device
        Where it is.
    """

    def __init__(self, settings: DictConfig, method: SSLMethod, device: torch.device) -> None:
        self._method = method
        self._clients: dict[int, dict[str, Any]] = {}
        self._health = None
        if settings.health_pictures:
            self._health = Health(
                load(settings.dataset, "federated").images,
                pictures=settings.health_pictures,
                augment=make(settings.augmentation),
                mean=settings.dataset.mean,
                std=settings.dataset.std,
                device=device,
                seed=settings.seed,
            )
        self._encoder = {name for name in method.tensors if name.startswith("encoder.")}

    def observe(self, client: int, layers: Layers) -> None:
        """Measure a client's model; one of which only some layers arrived cannot be measured."""
        encoder = {name: array for name, array in layers.items() if name in self._encoder}
        if self._health and len(encoder) == len(self._encoder):
            load_layers(self._method, encoder)
            self._clients[client] = self._health.measure(self._method.encoder)

    def finish(self, layers: Layers) -> list[dict[str, Any]]:
        """The measures of the global model (``client`` is None) and of the clients observed since the last call."""
        if not self._health:
            return []
        load_layers(self._method, layers)
        measured = {None: self._health.measure(self._method.encoder), **self._clients}
        self._clients = {}
        return [{"client": client, **numbers} for client, numbers in measured.items()]


def summary(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The global model's numbers and their means over clients, without the spectra."""
    numbers = [{key: value for key, value in row.items() if isinstance(value, float)} for row in measured]
    result: dict[str, Any] = {"global": numbers[0]}
    if len(numbers) > 1:
        result["clients"] = {key: mean(row[key] for row in numbers[1:]) for key in numbers[0]}
    return result


def warn_of_collapse(measured: list[dict[str, Any]]) -> None:
    """A line in the log for models whose pictures lie on nearly one point or one line."""
    ill = [row for row in measured if row["spread"] < LEAST_SPREAD or row["effective_rank"] < LEAST_RANK]
    if ill:
        names = ", ".join("the global model" if row["client"] is None else f"client {row['client']}" for row in ill)
        worst = min(ill, key=lambda row: float(row["effective_rank"]))
        log.warning(
            "the representation has collapsed in %s: effective rank %.1f, spread %.3f",
            *(names, worst["effective_rank"], worst["spread"]),
        )
