"""Health of the representation in rounds of evaluation: of the global model, and of every client's as it arrives.

The representations themselves are kept as well, to be drawn after the run (FedU2, Figs. 4 and 5).
"""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn

from fedssl.config import make
from fedssl.datasets.base import load
from fedssl.evaluation.features import extract
from fedssl.evaluation.health import Health
from fedssl.layers import Layers
from fedssl.methods.base import SSLMethod
from fedssl.model_layers import load_layers, travelling_names
from fedssl.report.representations import Representations
from fedssl.seeding import torch_generator

log = logging.getLogger("fedssl")

# Below any of these a representation has collapsed; trained encoders lie above 0.2, 5 and 2.5.
LEAST = {"spread": 0.05, "effective_rank": 1.5, "covariance_rank": 2.0}


@dataclass(frozen=True)
class Measurement:
    """The global model and the clients' models of one round.

    Attributes
    ----------
    rows : list of dict
        Numbers of health by name and, under ``client``, whose they are: the global model's (None), then the clients'.
    representations : Representations
        Of the same models, in the same order.
    """

    rows: list[dict[str, Any]]
    representations: Representations


class Monitor:
    """Measures models on the same pictures of the data set, labelled or not.

    Health is measured on pictures of the clients' split. The representations that are kept are those of test pictures,
    as in FedU2, or of the clients' where there are none.

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
        self._method, self._device = method, device
        self._measured: dict[int, tuple[dict[str, Any], list[np.ndarray]]] = {}
        self._health = None
        if not settings.health_pictures:
            return
        self._statistics = {"mean": settings.dataset.mean, "std": settings.dataset.std}
        federated = load(settings.dataset, "federated")
        self._health = Health(
            federated.images,
            pictures=settings.health_pictures,
            augment=make(settings.augmentation),
            device=device,
            seed=settings.seed,
            **self._statistics,
        )
        shown = load(settings.dataset, "test") or federated
        order = torch.randperm(len(shown.images), generator=torch_generator(settings.seed, "shown"))
        chosen = order[: settings.health_pictures]
        self._images = shown.images[chosen]
        self._labels = None if shown.labels is None else shown.labels[chosen].numpy()
        # What is kept: h, and z where it lies on a sphere that can be drawn as it is.
        self._maps: list[nn.Module] = [method.encoder]
        parts = dict(method.named_children())
        if "projector" in parts and parts["projector"].out_features == 3:
            self._maps.append(nn.Sequential(method.encoder, parts["projector"]))

    def observe(self, client: int, layers: Layers) -> None:
        """Measure a client's model; one of which only some layers arrived cannot be measured."""
        if self._health and layers.keys() >= self._needed():
            measured = self._measure(layers, f"client {client}")
            if measured:
                self._measured[client] = measured

    def finish(self, layers: Layers) -> Measurement | None:
        """The global model and the clients observed since the last call; None if it is off or finds no numbers."""
        clients, self._measured = self._measured, {}
        measured = self._measure(layers, "the global model") if self._health else None
        if not measured:
            return None
        models = [measured, *clients.values()]
        rows = [{"client": client, **numbers} for client, (numbers, _) in zip([None, *clients], models, strict=True)]
        kept = [np.stack(vectors) for vectors in zip(*(vectors for _, vectors in models), strict=True)]
        z = kept[1] if len(kept) > 1 else None
        return Measurement(rows, Representations(np.array(list(clients), dtype=np.int64), kept[0], z, self._labels))

    def _needed(self) -> set[str]:
        """Names of the layers between pictures and what is kept; stages that do not run at present are not needed."""
        parts = ("encoder.", "projector.")[: len(self._maps)]
        return {name for name in travelling_names(self._method) if name.startswith(parts)}

    def _measure(self, layers: Layers, name: str) -> tuple[dict[str, Any], list[np.ndarray]] | None:
        """Numbers of health and the unit vectors that are kept; a warning and None if some are not finite."""
        load_layers(self._method, {layer: layers[layer] for layer in self._needed()})
        maps = [extract(part, self._images, device=self._device, **self._statistics) for part in self._maps]
        numbers: dict[str, Any] = {}
        if all(vectors.isfinite().all() for vectors in maps):
            with suppress(torch.linalg.LinAlgError):  # the pictures of `Health` are others: they may give no spectrum
                numbers = self._health.measure(self._method.encoder)
        if not numbers or not all(math.isfinite(value) for value in numbers.values() if isinstance(value, float)):
            log.warning("%s gives representations that are NaN or infinite: its training has diverged", name)
            return None
        return numbers, [F.normalize(vectors.double(), dim=1).half().numpy() for vectors in maps]


def summary(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The global model's numbers, and the means of the clients' without their spectra."""
    own, *clients = measured
    result: dict[str, Any] = {"global": {key: value for key, value in own.items() if key != "client"}}
    if clients:
        single = [key for key, value in own.items() if isinstance(value, float)]
        result["clients"] = {key: mean(row[key] for row in clients) for key in single}
    return result


def warn_of_collapse(measured: Sequence[Mapping[str, Any]]) -> None:
    """A line in the log for models whose pictures lie on nearly one point or one line."""
    ill = [row for row in measured if any(row[name] < least for name, least in LEAST.items())]
    if ill:
        names = ", ".join("the global model" if row["client"] is None else f"client {row['client']}" for row in ill)
        worst = min(ill, key=lambda row: float(row["covariance_rank"]))
        log.warning(
            "the representation has collapsed in %s: effective rank %.1f, rank of the covariance %.1f, spread %.3f",
            *(names, worst["effective_rank"], worst["covariance_rank"], worst["spread"]),
        )
